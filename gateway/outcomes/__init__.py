"""What answers came to, and what that teaches: P(success) of a tier at a kind of request, learnt from traffic.

Start reading at `service.py`; `weighing.py` says what an outcome is worth, `store.py` keeps them.
"""
