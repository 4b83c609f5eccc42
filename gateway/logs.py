"""Structured logs: one line per event, as text for people or JSON for machines.

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
_encoder = msgspec.json.Encoder(enc_hook=str)


def redact(text: str) -> str:
    """Blank API keys and bearer tokens, keeping enough to recognise which."""
    return _SECRET.sub(lambda match: match.group(0)[:8] + "…", text)


class _Formatter(logging.Formatter):
    def __init__(self, json: bool) -> None:
        super().__init__()
        self._json = json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if self._json:
            line = {"time": stamp, "level": record.levelname.lower(), "event": message, **fields}
            return redact(_encoder.encode(line).decode())
        pairs = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        return redact(f"{stamp} {record.levelname.lower():7} {message}{pairs}")


def setup(settings: LogSettings) -> None:
    """Send everything to standard output in the configured form."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(settings.format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for noisy in ("uvicorn.access", "aiosqlite", "watchfiles", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def enabled(level: int) -> bool:
    """Whether a line of this level would be written: worth asking where its fields cost something."""
    return logger.isEnabledFor(level)


def log(level: int, event: str, **fields: Any) -> None:
    """One structured line: `log(logging.INFO, "request finished", request_id=..., status=200)`."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})
