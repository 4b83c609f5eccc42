"""Answers that are checked before anybody sees them, and requests that a larger tier is asked again.

Start reading at `asking.py`; what is checked stands in `checks.py`.
"""
