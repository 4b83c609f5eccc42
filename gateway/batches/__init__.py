"""`/v1/batches`: files of requests that are answered when there is room, within a day, at a price of their own.

Start reading at `routes.py` and `running.py`. A batch goes one way: `checking.py` reads its lines, `running.py` asks
them (`line.py`: one of them on its way through the pipeline), `results.py` keeps what came of each, `ending.py` makes
the files of it. `store.py` holds the rows, `working.py` decides which process works on which batch.
"""
