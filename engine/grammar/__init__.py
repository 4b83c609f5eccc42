"""Structured output: what an answer must be, from the request's fields to masks over the next token.

    lark.py       what the client asks for → one grammar text        (HTTP process)
    checker.py    is it one, and cheap enough? else a 400            (HTTP process, asks check_process.py)
    compiling.py  grammar text → the state of one request            (core, beside its loop)
    state.py      which tokens may come next, and advancing          (core, in the step)

llguidance does the parsing. Its grammars are a dialect of Lark with JSON schemas inside, which covers everything that
can be asked for, so one text crosses to the core, whatever the request was.
"""
