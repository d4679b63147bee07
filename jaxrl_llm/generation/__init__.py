"""In-graph continuous batching and the sampler."""
