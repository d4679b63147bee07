"""Resumable checkpoints, and Hugging Face import and export."""
