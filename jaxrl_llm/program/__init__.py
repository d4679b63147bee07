"""Stages as compiled programs: made by threads, kept on disk, dispatched to devices."""
