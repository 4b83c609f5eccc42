"""Commands as people run them, and a `tierline.yaml` for them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from gateway.cli.main import build


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    returncode: int
    stdout: str
    stderr: str


def tierline(*arguments: str) -> Done:
    """Run a command in this process, as the console script does."""
    word = next((argument for argument in arguments if not argument.startswith("-")), "")
    result = CliRunner().invoke(build(word), arguments, env={"COLUMNS": "160"}, prog_name="tierline")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def console_script(*arguments: str, cwd: Path | None = None) -> Done:
    """Run a command in a process of its own: what becomes another program needs one."""
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)
    return Done(done.returncode, done.stdout, done.stderr)


def configuration(folder: Path, *, port: int = 8080, engine: str = "", extra: str = "") -> Path:
    """A `tierline.yaml` in `folder`; `engine` is the YAML of one engine named e."""
    path = folder / "tierline.yaml"
    models = "models:\n  m: {tier: small, backend: b}\nbackends:\n  b: {engine: e}\n" if engine else ""
    engines = f"engines:\n  e: {engine}\n" if engine else ""
    (folder / "policies").mkdir(exist_ok=True)
    (folder / "policies/default.yaml").write_text("version: 1\nname: default\nowner: me\nroutes: [{tier: small}]\n")
    path.write_text(f"version: 1\nserver: {{port: {port}}}\nstorage: {{data_dir: data}}\n{models}{engines}{extra}")
    return path
