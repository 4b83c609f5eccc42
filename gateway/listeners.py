"""Where the processes of one `tierline up` listen: hosts that are addresses of this machine, ports that are free."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

from gateway.processes import CannotStart, autostarted
from gateway.settings import Settings
from policies.yamlread import Location


class _Listener(NamedTuple):
    """Where a process will listen, and the keys that say so."""

    port_key: Location
    host_key: Location
    host: str
    port: int


def check_ports(settings: Settings) -> None:
    """Refuse ports that are taken, before anything starts.

    Raises:
        CannotStart: names the port, the key in the file, and the program that has it where that can be seen.
    """
    check_hosts(settings)
    for listener in _listeners(settings):
        if listener.port == 0:
            text = (
                f"{_dotted(listener.port_key)} is 0, which means any port; the other processes must know it: name one."
            )
            raise CannotStart(text, listener.port_key)
        _check_port(listener)


def check_hosts(settings: Settings) -> None:
    """Refuse names to listen on that stand for no address.

    Raises:
        CannotStart: names the host and the key in the file.
    """
    for listener in _listeners(settings):
        try:
            socket.getaddrinfo(listener.host or None, listener.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: an empty or overlong part between dots
            why = error.strerror if isinstance(error, OSError) else str(error)
            text = (
                f"{_dotted(listener.host_key)}: the host '{listener.host}' cannot be resolved ({why}): "
                "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them."
            )
            raise CannotStart(text, listener.host_key) from error


def _listeners(settings: Settings) -> list[_Listener]:
    server = settings.server
    found = [_Listener(("server", "port"), ("server", "host"), server.host, server.port)]
    if settings.cache.enabled and settings.cache.embeddings_port is not None:
        key = ("cache", "embeddings_port")
        found.append(_Listener(key, key, "127.0.0.1", settings.cache.embeddings_port))
    if (address := settings.admin.address()) is not None and settings.admin_enabled():
        found.append(_Listener(("admin", "listen"), ("admin", "listen"), *address))
    for name in autostarted(settings):
        engine = settings.engines[name]
        found.append(_Listener(("engines", name, "port"), ("engines", name, "host"), engine.host, engine.port))
    return found


def _dotted(key: Location) -> str:
    return ".".join(str(part) for part in key)


def _check_port(listener: _Listener) -> None:
    host, port = listener.host, listener.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                text = f"{_dotted(listener.host_key)}: '{host}' is no address of this machine."
                raise CannotStart(text, listener.host_key) from error
            key = _dotted(listener.port_key)
            raise CannotStart(
                f"port {port} on {host} ({key}) cannot be used: {error.strerror}{_holder(port)}. "
                f"Stop the program that has it, or change {key} in tierline.yaml.",
                listener.port_key,
            ) from error


def _holder(port: int) -> str:
    """Who listens on the port, as far as this user may see it."""
    import psutil  # here, because only the error path needs it

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr
            if listens and listens.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        pass  # not ours to see: the message does without the name
    return ""
