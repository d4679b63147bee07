"""Plans a run before it has GPUs: memory, time and traffic of each stage on any number of them."""
