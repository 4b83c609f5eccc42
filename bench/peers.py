"""Other gateways, set up to be measured beside ours in the same run, each in an environment of its own.

Nothing of them is configured but the way to the upstream: no keys, limits, ledger or cache, which they have or may not
have. Add one as a function that yields the command to start it, and a line in `PEERS`.

    python -m bench.gateway --peers litellm,portkey,tensorzero,nginx
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_LITELLM = ["litellm[proxy]>=1.80,<2"]
_TENSORZERO = ["tensorzero>=2026.1"]
# Newer servers of its web framework break every stream of this gateway.
_PORTKEY = {"private": True, "overrides": {"@hono/node-server": "1.14.1"}}
_PORTKEY_PACKAGE = "@portkey-ai/gateway@^1.15"

_TENSORZERO_SERVER = """\
import signal, sys, threading
from tensorzero import _start_http_gateway
gateway = _start_http_gateway(config_file=sys.argv[1], clickhouse_url=None, postgres_url=None, valkey_url=None,
                              async_setup=False)
print(gateway.base_url, flush=True)
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
stop.wait()
gateway.close()
"""

_NGINX = """\
worker_processes 1; daemon off; pid {directory}/nginx.pid; error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  upstream mock {{ server {authority}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    location / {{ proxy_pass http://mock; }}
  }}
}}
"""


@dataclasses.dataclass(frozen=True)
class Start:
    """How a peer is started. Where `prints_url`, it chooses its base URL and prints it.

    `models` are its names for what the mock calls plain, paced and burst.
    """

    command: Sequence[str]
    models: Mapping[str, str]
    headers: Sequence[str] = ()
    prints_url: bool = False


Prepare = Callable[[Path, Path, str, int, Mapping[str, str]], Start]


def _environment(at: Path, packages: Sequence[str]) -> Path:
    """A virtual environment with these packages, made once. Returns its folder of programs."""
    if not (at / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(at)], check=True)
        subprocess.run([str(at / "bin" / "pip"), "install", "--quiet", *packages], check=True)
        (at / "installed").touch()
    return at / "bin"


def litellm(installed: Path, directory: Path, upstream: str, port: int, models: Mapping[str, str]) -> Start:
    """LiteLLM's proxy, one worker, no database."""
    programs = _environment(installed / "litellm", _LITELLM)
    listed = [
        {"model_name": name, "litellm_params": {"model": f"openai/{model}", "api_base": upstream, "api_key": "sk-none"}}
        for name, model in models.items()
    ]
    config = directory / "litellm.yaml"  # JSON is YAML
    config.write_text(json.dumps({"model_list": listed, "general_settings": {"master_key": "sk-bench"}}))
    command = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_TELEMETRY=False", "LITELLM_LOG=ERROR"]
    command += [str(programs / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    return Start([*command, "--num_workers", "1"], {name: name for name in models}, ["authorization: Bearer sk-bench"])


def portkey(installed: Path, directory: Path, upstream: str, port: int, models: Mapping[str, str]) -> Start:
    """Portkey's open gateway, on Node."""
    at = installed / "portkey"
    program = at / "node_modules/@portkey-ai/gateway/build/start-server.js"
    if not program.exists():
        at.mkdir(parents=True, exist_ok=True)
        (at / "package.json").write_text(json.dumps(_PORTKEY))
        subprocess.run(["npm", "install", "--silent", _PORTKEY_PACKAGE], cwd=at, check=True)
    headers = ["authorization: Bearer sk-none", "x-portkey-provider: openai", f"x-portkey-custom-host: {upstream}"]
    command = ["env", "NODE_ENV=production", "node", str(program), f"--port={port}", "--headless"]
    return Start(command, models, headers)


def tensorzero(installed: Path, directory: Path, upstream: str, port: int, models: Mapping[str, str]) -> Start:
    """TensorZero's gateway in Rust, as its Python package embeds it, without observability. Chooses its own port."""
    programs = _environment(installed / "tensorzero", _TENSORZERO)
    lines = ["[gateway]", "observability.enabled = false"]
    for name, model in models.items():
        lines += [f"[models.{name}]", 'routing = ["openai"]', f"[models.{name}.providers.openai]", 'type = "openai"']
        lines += [f'model_name = "{model}"', f'api_base = "{upstream}/"', 'api_key_location = "none"']
    config = directory / "tensorzero.toml"
    config.write_text("\n".join(lines) + "\n")
    command = [str(programs / "python"), "-c", _TENSORZERO_SERVER, str(config)]
    return Start(command, {name: f"tensorzero::model_name::{name}" for name in models}, prints_url=True)


def nginx(installed: Path, directory: Path, upstream: str, port: int, models: Mapping[str, str]) -> Start:
    """nginx as a reverse proxy: no gateway, but what a relay in C costs."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise FileNotFoundError("nginx is not installed: on Debian and Ubuntu, install nginx-light")
    config = directory / "nginx.conf"
    authority = upstream.removeprefix("http://").partition("/")[0]
    config.write_text(_NGINX.format(directory=directory, authority=authority, port=port))
    return Start([program, "-p", str(directory), "-c", str(config)], models)


PEERS: Mapping[str, Prepare] = {"litellm": litellm, "portkey": portkey, "tensorzero": tensorzero, "nginx": nginx}
