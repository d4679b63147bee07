"""Hot operations: one dispatching function a file, each beside its plain reference."""
