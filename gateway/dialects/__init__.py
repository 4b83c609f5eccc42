"""HTTP dialects: how a client's request is read and how answers and errors are written in its own terms.

Start reading at `dialect.py` (what each must do), then `openai_chat.py`, whose form is also the common one.
"""
