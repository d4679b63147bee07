"""Held-out evaluation, answers to prompts, and export of a model."""
