"""What only the admin API says; docs/reference/admin-api.md lists all its codes."""

from __future__ import annotations

from gateway.dialects.errors import GatewayError


class Conflict(GatewayError):
    """What was to be made exists."""

    status = 409
    type = "invalid_request_error"
    code = "already_exists"


class PreconditionFailed(GatewayError):
    """What was to be changed is not as the client saw it last."""

    status = 412
    type = "invalid_request_error"
    code = "changed_meanwhile"
