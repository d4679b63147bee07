"""Metrics, trackers, timing and the console."""
