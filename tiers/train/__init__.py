"""Training of the task classifier and of the success table, and their evaluation on held-out data.

Run `python -m tiers.train --data DIR`; needs the extra [train]. Nothing here is imported when Tierline runs.
Start reading at `corpus.py` (what is learned from), then `fit.py`, then `outcomes.py`.
"""
