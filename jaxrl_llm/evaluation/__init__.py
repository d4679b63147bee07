"""What a model can do: held-out evaluation, answers to prompts; and its export."""
