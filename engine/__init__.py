"""The inference engine: paged KV cache, prefix cache, continuous batching, kernels, and its own HTTP server.

It promises that `free + cached + used == total` pages hold after every step and that an abort frees within one step.
Start reading at `core.py` (the loop: schedule, run, emit), then `scheduler.py` (what runs), `block_pool.py` (which
pages it holds, and when they are freed) and `runner.py` (the forward pass).
"""
