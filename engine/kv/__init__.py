"""The KV cache as pages: the pool, the prefix cache over it, and what is told of them."""
