"""The admin API, `/admin/v1/…`: organisations to keys, usage, policies, models, cache, audit log, over HTTP.

Start reading at `routes.py`, the table of what there is; `call.py` is the life of a request. What is changed is changed
by the functions of `gateway.access`, which the command line uses as well.
"""
