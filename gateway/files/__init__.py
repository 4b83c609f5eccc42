"""`/v1/files`: what clients upload for batches, and what batches make of it.

Start reading at `routes.py`; `upload.py` reads a form as it comes, `store.py` keeps whose file is what in the database,
`content.py` the bytes.
"""
