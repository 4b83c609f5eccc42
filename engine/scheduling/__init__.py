"""Requests and their turns: which tokens run in the next step. No tensor in sight."""
