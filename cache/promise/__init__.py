"""The promise of the learning cache: at most so many of the hits in other words are wrong, kept and measured.

Pure: no clock, no chance and no file of its own. Start at `rule.py` (what a policy asks, what is answered), then
`keeper.py`. Importing the types loads neither numpy nor scipy: the gateway reads them off the wire.
"""
