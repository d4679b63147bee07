"""The one loop of a run, and what a step needs: batches, rewards, states, output."""
