"""Cache processes that share their answers through Redis: what one keeps or forgets, all do within a second.

Redis holds the answers and one numbered log of changes. Start reading at `replica.py`, then `shared.lua` (what Redis
does) and `records.py` (what travels).
"""
