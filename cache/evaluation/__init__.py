"""The cache measured on anyone's questions: files of them, what the cache does with each, and the rates.

Start at `stream.py` and `pairs.py`; the command is `cache/evaluate.py`.
"""
