"""Advantages, losses and KL terms: pure functions of arrays."""
