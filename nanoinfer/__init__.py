"""nanoinfer: paged KV cache, continuous batching, sampling. Start at `engine.py`."""
