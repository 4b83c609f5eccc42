"""Guardrails: what goes to models and what comes back is looked through, by the rules of the policy.

A request without such rules passes through none of this. Start reading at `request.py`; answers are `answer.py` (whole)
and `stream.py`. What a rule looks for is in `policies/guards.py`.
"""
