"""What the gateway remembers for `/v1/responses`: answers that a client may look up, delete or go on from.

Start reading at `turns.py`, the pipeline's step; `store.py` keeps the answers in the database, `routes.py` gives them
out. It is the only place where Tierline keeps the text of requests and answers beyond the cache.
"""
