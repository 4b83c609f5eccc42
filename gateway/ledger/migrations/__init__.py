"""Alembic migrations of the database. `gateway.ledger.database.Database.migrate` runs them; nobody else needs to.

To add one: change `schema.py`, write `versions/NNNN_subject.py` by hand, set `schema.HEAD`; a test compares both.
"""
