"""The HTTP edge of the gateway and of the engine: what stands between a socket and their ASGI application.

It promises that no client, slow, endless or malformed, holds memory or a connection for longer than the limits say,
and that a stop drains. Start reading at `limits.py`, then `connection.py` (one connection), `server.py` (all of them).
"""
