"""The exact and semantic answer cache: keys, eligibility, embedder, FAISS index, store, and its own process.

It promises that no answer crosses a tenant, a context or a model boundary, and that losing it loses only speed.
Start reading at `key.py` (what must be equal), then `service.py` (the process) and `client.py` (how to ask it).
"""
