"""The engine's own HTTP server: the OpenAI dialect with vLLM's extra fields, in a process that never imports torch.

It promises that every parameter is honoured or refused with a 400, and that a client that leaves frees its pages. Start
reading at `app.py` (routes), then `respond.py` (the life of a request); `schema.py` is what may be asked, `dialect.py`
how it is answered.
"""
