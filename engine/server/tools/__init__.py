"""Tool calls: how families write them, how an answer is held to them, and how they are found in what was generated.

`families.py` knows the families and chooses one; `calls.py`, `json_call.py` and `harmony.py` find calls in text;
`prompting.py` tells a model of tools where its template does not.
"""
