"""Idempotency keys: a request that is sent again with its key gets the answer of the first, and is billed once.

Start with `step.py`, the pipeline's step; `recording.py` is the answer that several clients follow, `answers.py` keeps
answers within bounds, `shared.py` shares them between processes through Redis.
"""
