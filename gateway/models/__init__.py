"""Models on this machine: what can be pulled by name, how it is fetched and checked, where it lies.

It promises that a model file is complete and has the checksum on record before any process opens it.
Start reading at `store.py` (pull, list, find), then `catalog.py` (what can be had by name).
"""
