"""Policies that are tried in the place of others: their traffic is counted, compared, and taken from them if need be.

Start reading at `keeper.py` (what each process does, second by second), then `judging.py` (when the new one is worse).
"""
