"""Simulation of policies on what this installation has on record: `policies/simulation` with the ledger behind it.

Start reading at `run.py`.
"""
