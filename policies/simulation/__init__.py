"""What a change of policies would have done to recorded traffic. Pure arithmetic: whoever calls brings the requests.

Start reading at `simulate.py` (one request under both sets), then `deciding.py` (what of a record can be decided again)
and `sums.py` (how sure a figure is).
"""
