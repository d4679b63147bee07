"""The model families, over shared layers."""
