"""Train state, forward passes and the one train step."""
