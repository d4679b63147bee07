"""Compiled programs: made by threads, kept on disk, counted, guarded. Nothing here knows RL."""
