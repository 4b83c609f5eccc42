"""What all connections of one server have in common."""

from __future__ import annotations

from uvicorn.server import ServerState

from edge.cycle import header_lines
from edge.limits import Limits


class State(ServerState):
    """What all connections of a server share. `draining`: every answer from now on ends its connection."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.silence_s = limits.silence_s
        self.draining = False

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer has; uvicorn sets it once a second, for the date."""
        return self._default_headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._default_headers = headers
        self.default_lines = header_lines(headers)
