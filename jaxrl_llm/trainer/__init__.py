"""The one loop of a run, and what it needs: data, batches, states, evaluation, output."""
