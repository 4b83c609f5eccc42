"""Which replica of a backend gets a request: where its prefix is computed already, and where it waits least.

It promises that a replica is preferred for what it holds by no more than the tokens that this saves; that what an
operator prefers (groups by length, pools, regions, hours) comes before that; and that it knows no text: prefixes are
keyed digests. Start reading at `placer.py` (the choice), then `index.py` (who holds what).
"""
