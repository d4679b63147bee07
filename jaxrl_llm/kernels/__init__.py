"""Hot operations. Each has one dispatching function and a plain reference: see docs/kernels.md."""
