"""What `tierline up` says: a short line for each event, and what to do once everything is up."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from gateway import workers
from gateway.cli.common import short
from gateway.settings import Settings
from gateway.supervisor import Event


class FirstKey(NamedTuple):
    """The file of the first key. `token` opens the door; where it is None, `problem` says why: `works no more: …`.

    `in_full`: it may be printed, because it is new, or because only a terminal sees it. What a later start prints may
    end in a file or a journal that others read.
    """

    path: Path
    token: str | None
    problem: str = ""
    in_full: bool = False


class Words:
    """Events for a person at a terminal. `config` is the platform file, where the command line named one; `admin_key`
    the file of the first admin key."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        first_key: FirstKey,
        config: Path | None = None,
        admin_key: Path | None = None,
    ) -> None:
        self._settings = settings
        self._url = url
        self._first_key = first_key
        self._config = config
        self._admin_key = admin_key
        names = (workers.name(settings, settings.server.workers), *(f"engine-{name}" for name in settings.engines))
        self._width = 1 + max(map(len, names))

    def print(self, event: Event) -> None:
        detail = event.detail or {}
        seconds = detail.get("seconds")
        words = {
            "starting": "starting",
            "waiting": f"not ready after {seconds} s; it said: {detail.get('said') or 'nothing yet'}",
            "ready": f"ready on {detail.get('address')} ({seconds} s)",
            "exited": self._exited(detail),
            "restarting": f"starting again in {seconds} s",
            "stopping": f"stopping, at most {seconds} s; Ctrl-C again stops at once",
            "killed": f"killed: it did not stop within {seconds} s",
            "failed": f"cannot start: {detail.get('message')}",
            "stopped": "stopped",
            "said": str(detail.get("said")),
            "up": self.up(),
        }
        name = event.process or "tierline"
        line = words[event.kind] if event.kind == "up" else f"{name:<{self._width}} {words[event.kind]}"
        print(line, file=sys.stderr if event.kind in ("exited", "failed") else sys.stdout, flush=True)

    def _exited(self, detail: dict[str, object]) -> str:
        tail = detail.get("tail")
        last = "".join(f"\n    {line}" for line in tail[-5:]) if isinstance(tail, list) else ""
        return f"ended with code {detail.get('code')}; the end of {short(Path(str(detail.get('log'))))}:{last}"

    def up(self) -> str:
        """What to do now: the address, the first key and its file, and a line to paste."""
        token, path = self._first_key.token, short(self._first_key.path)
        question = '[{"role": "user", "content": "What is the capital of France?"}]'
        body = f'{{"model": "auto", "temperature": 0, "messages": {question}}}'
        program = _program()
        if not token:
            config = f" --config {shlex.quote(short(self._config))}" if self._config else ""
            new_key = f"{program} keys create --name NAME{config}"
            key = [f"  first key  {self._first_key.problem}", f"             a new key: {new_key}"]
        elif self._first_key.in_full:
            key = [f"  first key  {token}   (kept in {path})"]
        else:
            key = [f"  first key  in {path}"]
        # The line may be pasted elsewhere than where this was started.
        bearer = f"$(cat {shlex.quote(str(self._first_key.path.absolute()))})" if token else "YOUR_KEY"
        lines = ["", f"Tierline is up: {self._url}/v1", "", *key]
        if self._admin_key is not None:
            lines.append(f"  admin key  in {short(self._admin_key)}")
        lines += [
            f"  logs       {short(self._settings.storage.data_dir / 'log')}",
            f"  commands   {program} --help",
            "  stop       Ctrl-C",
            "",
            f"  curl {self._url}/v1/chat/completions \\",
            f'    -H "Authorization: Bearer {bearer}" \\',
            f"    -H 'Content-Type: application/json' -d '{body}'",
            "",
        ]
        return "\n".join(lines)


def _program() -> str:
    """As it can be typed from here: after `make run` the command is in the environment, not on the path."""
    return "tierline" if shutil.which("tierline") else shlex.quote(short(Path(sys.executable).with_name("tierline")))
