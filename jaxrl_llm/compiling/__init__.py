"""Compiled programs: made side by side by threads, kept on disk, counted. Nothing here knows RL."""
