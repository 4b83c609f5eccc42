"""The decoder's layers: linear, norm, rotary embedding, attention; one interface each, one implementation per device.

Start reading at `attention.py` (the paged-attention interface), `ops.py` (the small operations) and `linear.py`;
`device.py` chooses.
"""
