"""Conversations that stay on their tier and model: who they are, where they are, and what becomes of each turn.

Start reading at `holding.py`; the arithmetic of staying and switching is `tiers/session.py`.
"""
