"""Where a request goes: its policy, its tier, and the models that may serve it, in the order in which to try them.

Start reading at `route.py`.
"""
