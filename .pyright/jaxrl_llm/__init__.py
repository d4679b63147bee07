"""For pyright alone: where setuptools' package-dir puts models/ and configs/."""
