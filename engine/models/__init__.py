"""Models: a declarative spec, the tensors it asks for, and one generic decoder that runs them.

Start reading at `spec.py`, then `decoder.py`. A model family is a map in `engine/loader/families.py`, not a class here.
"""
