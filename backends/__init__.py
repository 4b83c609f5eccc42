"""Servers that serve models: wire protocol types, clients, replica pools, health, retry and failover.

It promises that a failure before the first content is invisible to the client, and none after it looks like success.
Start reading at `protocol.py` (the wire types), then `dispatch.py` (one request over many candidates).
"""
