"""Measurements that anyone can re-run, each with a peer or a physical limit beside it.

Every bench prints a table and writes `bench/results/NAME.json`; `report.py` is the one writer of both.
"""
