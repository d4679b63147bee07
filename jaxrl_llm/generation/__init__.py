"""The generation engine: queue, slots, prefill, decode, tail, KV cache, pages and sampler."""
