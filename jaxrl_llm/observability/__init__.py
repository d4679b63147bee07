"""Metrics, trackers, timing, the trace and the console."""
