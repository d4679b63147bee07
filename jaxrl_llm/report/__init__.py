"""The report of a run: one HTML page without network, of curves, samples, alarms and config."""
