"""Who may ask, how much, and for how much money: keys, rate limits, budgets and the holds that reserve both.

It promises that no secret is stored or shown twice, that admission is atomic, and that `used = settled + held`, always.
Start reading at `keys.py` (who) and `levels.py` (whose), then `limits.py` (what admission means) and
`counters_memory.py` (how it is counted), or `counters_redis.py` and `counters_shared.py` (how several processes count
together).
"""
