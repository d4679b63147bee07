"""Programs that a model wrote, run apart from everything: `box.py` is the side of the caller."""
