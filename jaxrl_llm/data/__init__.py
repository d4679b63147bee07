"""Where prompts and examples come from, and how they become token batches."""
