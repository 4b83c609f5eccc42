"""Single flight over gateway processes: of many equal questions at once, wherever they come in, one goes to a backend.

`cache.flight` is the flight of one process. Start reading at `flying.py` (what a request does with it), then
`shared.py` (leases in Redis, and an answer that passes from process to process as it comes).
"""
