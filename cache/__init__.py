"""The exact and semantic answer cache: keys, eligibility, embedder, FAISS index, store, and its own process.

It promises that no answer crosses a tenant, a context or a model boundary, and that losing it loses only speed.
Start reading at `key.py` (what must be equal), then `answering.py` (what is a hit) with `words/guards.py` (what must
not be one), `service.py` (the process) and `client.py` (how to ask it).
"""
