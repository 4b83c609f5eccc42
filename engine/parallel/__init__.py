"""One model in several processes: tensor, expert and pipeline parallelism on one machine.

Start with `layout.py` (who holds what), then `shards.py` (its weights), `peers.py` (what passes between the processes),
`crew.py` and `follower.py` (how the processes come and go).
"""
