"""Answers of several turns: tools, environments, and the loop that takes turns with an engine."""
