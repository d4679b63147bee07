"""The benchmarks behind scripts/benchmark.py, one file each."""
