"""Whether an answer that lies near is the right one: neighbours, what they and the words say, and a calibrated chance.

Pure functions of texts and numbers. Start at `neighbours.py` (who is the candidate), then `features.py` (what is read
off) and `model.py` (how likely it is right). `train.py` makes `prior.json`; DATA.md says from what.
"""
