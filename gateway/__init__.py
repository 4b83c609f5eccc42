"""The front door: HTTP dialects, the life of a request, access, ledger, telemetry, CLI, supervisor.

It promises that every request is authenticated, metered and settled exactly once, whatever happens.
Start reading at `pipeline.py`, the life of a request from top to bottom.
"""
