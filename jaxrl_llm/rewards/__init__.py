"""Graders, and the user's own reward functions."""
