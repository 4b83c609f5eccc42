"""Making four-bit weights of a model: AWQ and GPTQ, calibrated on texts, with the perplexity before and after.

Start reading at `model.py` (block after block), then `gptq.py` and `awq.py` (one product each), then `grid.py`.
"""
