"""The ledger: what every attempt used, what it cost to a nano-dollar, and why it went where it went.

It promises one row per attempt, also for aborted ones, also after `kill -9`; totals are sums of rows, never counters.
Start reading at `rows.py` (what is recorded), then `journal.py` (how it survives), `writer.py` (how it is stored) and
`prices.py` (what it costs).
"""
