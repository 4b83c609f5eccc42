"""The inference engine: paged KV cache, prefix cache, continuous batching, kernels, and its own HTTP server.

It promises that `free + cached + used == total` pages hold after every step and that an abort frees within one step.
Start reading at `core.py` (the loop: schedule, run, emit), then `scheduler.py` and `runner.py`.
"""
