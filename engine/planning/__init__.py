"""Will it fit? A model's memory on a GPU as arithmetic, before anything is downloaded or loaded. No torch.

Start reading at `ledger.py` (the sums), then `shapes.py` (public models by name). `python -m engine.planning MODEL`
prints the ledger as JSON; `tierline models plan` prints it for people.
"""
