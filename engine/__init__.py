"""The inference engine: paged KV cache, prefix cache, continuous batching, kernels, and its own HTTP server.

Two processes serve a model: one speaks HTTP and never imports torch, the core computes. From a request's body to its
next token, in the order in which the files have their part:

    HTTP    server/endpoints.py      reads the body
            server/jobs.py           makes a job of it: token ids (text/), sampling parameters, a grammar (grammar/)
            server/respond.py        has it generated, and writes what comes as a stream or as one answer
            client.py                sends `Add` to the core; everything that the two say is in messages.py
    core    core.py                  the loop: drain the input, then a step, then tell of it
            stepper.py               a step: schedule → execute → update; or each begun before the one before is over
            admission.py             who waits for a grammar, or for pages that are kept elsewhere (transfer/)
    who     scheduling/scheduler.py  `schedule`: so many tokens of each request, a `StepPlan` (types.py)
            scheduling/roster.py     how a request comes in, starts, gives way and goes; scheduling/turns.py: whose turn
            kv/prefix_cache.py       pages whose content is known; kv/block_pool.py: free + cached + used == total
            spec/speculator.py       guesses at the tokens after the next, to be checked in the same step
    what    runner.py                `begin`: the plan's rows end to end (geometry.py), one forward pass over all
            models/decoder.py        the one decoder of every family, made of layers/, which run kernels/
            flight.py                from the states of a step to its results, and what is done without memory
            sampler.py               from logits to tokens: sampling/, a grammar's masks, drafts (spec/verify.py)
    then    scheduling/scheduler.py  `update`: tokens go to their requests, full pages become findable, who is done goes
            client.py                text/answer.py and text/detokenizer.py make text of tokens; a stop string ends it

There is no prefill phase and no decode phase: a request has tokens that are not computed yet, and a step computes some
of them. The scheduler knows requests and pages and no tensor, the runner tensors and no request. After every step the
law of pages holds, and an abort frees within one step.

Beside the step: loader/ reads files (quant/: their encodings, pipelines/: tokenizers), load_runner.py and memory.py
decide what fits, warm_up.py, graphs.py and piecewise.py make ready, adapters/ and parallel/ change what a product is,
planning/ and quantize/ are commands.
"""
