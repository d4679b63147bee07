"""Reinforcement learning of language models on GPU meshes, in JAX: one program, one mesh."""
