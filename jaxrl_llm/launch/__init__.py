"""Process start-up: jax.distributed, the compile cache, several processes on one machine."""
