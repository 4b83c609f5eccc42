"""Routing policies: YAML files that product owners edit, and the code that checks and evaluates them.

It promises that a bad edit is refused with file, line and suggestion while the last good version stays in force.
Start reading at `schema.py` (what may be written), then `evaluate.py` (what it means).
"""
