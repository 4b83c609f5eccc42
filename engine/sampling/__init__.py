"""The parts of sampling: `adjust` changes logits (bans, biases, penalties), `truncate` cuts the distribution's tail,
`draw` takes tokens from it, `logprobs` reports log-probabilities. `engine.sampler` puts them together; start there.
"""
