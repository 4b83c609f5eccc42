"""Promises on the false-hit rate: what may be served, what is audited, what is learned from it, and the bound.

Pure: time and chance are given from outside, nothing is read or written. Start at `keeper.py` (decide, observe), then
`fit.py` (the chance that an answer is right, and the bar) and `bounds.py` (what the audits prove).
"""
