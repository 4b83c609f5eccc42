"""Speculative decoding: cheap guesses at the next tokens, checked by the model in one step.

Start with `speculator.py`, which decides how many drafts a step takes; `proposer.py` says what a proposer is;
`ngram.py`, `draft_model.py` and `eagle.py` are three of them, and `verify.py` is how the runner checks drafts.
"""
