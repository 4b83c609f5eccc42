"""Structured logs: one line per event, as text for people or JSON for machines, whatever the values hold. As text, the
lines of a traceback follow, indented.

Secrets never reach a log: API keys are logged by their public prefix only, and a filter blanks what looks like one.
Prompts and answers are logged only when `server.log.prompts` is on.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Any

import msgspec

from gateway.settings import LogSettings

logger = logging.getLogger("tierline")

_SECRET = re.compile(r"\b(tla?-|sk-)[A-Za-z0-9_-]{16,}|(?i:bearer)\s+[A-Za-z0-9._~+/=-]{8,}")
# What would begin a new line, move the cursor or not be encoded (half a surrogate pair): written as an escape.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_encoder = msgspec.json.Encoder(enc_hook=str)


def redact(text: str) -> str:
    """Blank API keys and bearer tokens, keeping enough to recognise which."""
    return _SECRET.sub(lambda match: match.group(0)[:8] + "…", text)


def one_line(text: str) -> str:
    """The text with its control characters written as escapes, such as `\\n`."""
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)


class _Formatter(logging.Formatter):
    def __init__(self, json: bool) -> None:
        super().__init__()
        self._json = json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        message = record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if self._json:
            event = f"{message}\n{trace}" if trace else message
            return redact(_json({"time": stamp, "level": record.levelname.lower(), "event": event, **fields}))
        pairs = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        line = one_line(f"{stamp} {record.levelname.lower():7} {message}{pairs}")
        return redact(line + "".join(f"\n  {one_line(part)}" for part in trace.splitlines()))


def _json(line: dict[str, Any]) -> str:
    try:
        return _encoder.encode(line).decode()
    except UnicodeEncodeError:  # half a surrogate pair in a text
        plain = {name: str(value).encode(errors="backslashreplace").decode() for name, value in line.items()}
        return _encoder.encode(plain).decode()


def setup(settings: LogSettings) -> None:
    """Send everything to standard output in the configured form."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(settings.format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    # What is in force is said at any level: `tierline up` hears it from the log (`policy_news.py`).
    logging.getLogger("tierline.policies").setLevel(min(root.level, logging.INFO))
    for noisy in ("uvicorn.access", "aiosqlite", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def enabled(level: int) -> bool:
    """Whether a line of this level would be written: worth asking where its fields cost something."""
    return logger.isEnabledFor(level)


def log(level: int, event: str, **fields: Any) -> None:
    """One structured line: `log(logging.INFO, "request finished", request_id=..., status=200)`."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})
