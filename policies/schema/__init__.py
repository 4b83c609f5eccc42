"""What a policy file may say: every key, its type, its default and what it means.

This is the one source of the reference page and of `policies/schema.json`. Unknown keys are errors. Start reading at
`document.py`: the file as a whole; each of its parts has a module of its own.
"""
