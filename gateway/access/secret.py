"""The server secret and API tokens: made here, hashed here, shown never.

A token is `tl-` (`tla-` for the admin API) and 256 random bits in base 62. The database holds its BLAKE2b digest, keyed
by the server secret: a stolen database authenticates nobody and cannot be searched for tokens without the secret.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

logger = logging.getLogger("tierline.access")

PREFIX: Final = "tl-"
ADMIN_PREFIX: Final = "tla-"
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS: Final = 43  # 62**43 > 2**256
_SHOWN: Final = 6
_ENVIRONMENT: Final = "TIERLINE_SECRET"


class InvalidSecret(ValueError):
    """The server secret cannot be used; the message says why, never what it is."""


class ServerSecret:
    """The key of the digests. It prints as stars and has no way to be read back."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < 32:
            raise InvalidSecret("the server secret needs at least 32 bytes")
        self._key = key if len(key) <= hashlib.blake2b.MAX_KEY_SIZE else hashlib.blake2b(key).digest()

    def __repr__(self) -> str:
        return "ServerSecret(***)"

    def digest(self, token: str) -> str:
        """Keyed BLAKE2b (RFC 7693) of a token, 256 bits, hexadecimal: does what HMAC does, four times as fast."""
        return hashlib.blake2b(token.encode("utf-8", "surrogatepass"), key=self._key, digest_size=32).hexdigest()

    def fingerprint(self, *parts: bytes) -> str:
        """Likewise of several byte strings, kept apart: who finds it can neither read them nor guess short ones."""
        state = hashlib.blake2b(key=self._key, digest_size=32, person=b"fingerprint")
        for part in parts:
            state.update(len(part).to_bytes(8, "big"))
            state.update(part)
        return state.hexdigest()


def has_secret(path: Path) -> bool:
    """Whether there is a secret already, so that `load_secret` makes none."""
    return _ENVIRONMENT in os.environ or path.exists()


def load_secret(path: Path) -> ServerSecret:
    """The secret from `$TIERLINE_SECRET`, else from `path`, which is created with mode 0600 on first use.

    Replicas that share a database must share the secret: through the variable or the file.

    Raises:
        InvalidSecret: unreadable, or too short.
    """
    given = os.environ.get(_ENVIRONMENT)
    if given is not None:
        return ServerSecret(given.encode())
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, secrets.token_hex(32) + "\n", replace=False)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            logger.warning("%s was readable by others, which it must not be; its mode is now 0600", path)
            path.chmod(0o600)
        return ServerSecret(path.read_bytes().strip())
    except OSError as error:
        raise InvalidSecret(f"cannot use the server secret in {path}: {error}") from error
    except InvalidSecret as error:
        raise InvalidSecret(f"{path}: {error}; restore it, or delete it and make all keys anew") from error


def new_token(prefix: str = PREFIX) -> str:
    number = int.from_bytes(secrets.token_bytes(32), "big")
    digits = []
    for _ in range(_DIGITS):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return prefix + "".join(digits)


def is_token(text: str, prefix: str = PREFIX) -> bool:
    """Whether this has the form of a token."""
    digits = text.removeprefix(prefix)
    return text.startswith(prefix) and len(digits) == _DIGITS and set(digits) <= set(_ALPHABET)


def shown_prefix(token: str) -> str:
    """The part of a token that may be shown: enough to recognise it, too little to guess it."""
    return token[: token.find("-") + 1 + _SHOWN]


def kept_token(path: Path, prefix: str = PREFIX) -> str:
    """The token in a file (mode 0600), which is made with a new one where it holds none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, new_token(prefix) + "\n", replace=False)
    token = path.read_text().strip()
    if not is_token(token, prefix):
        token = new_token(prefix)
        write_private(path, token + "\n", replace=True)
    path.chmod(0o600)
    return token


def write_private(path: Path, text: str, *, replace: bool) -> bool:
    """Write a whole file with mode 0600, atomically.

    Returns:
        False when it exists and `replace` is off: then it is left as it is.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(name, path)
            return True
        try:
            os.link(name, path)
        except FileExistsError:
            return False
        return True
    finally:
        Path(name).unlink(missing_ok=True)
