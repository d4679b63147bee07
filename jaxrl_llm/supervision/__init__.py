"""Watches over a run: its folder, disk, time, signals, alarms, callbacks, traces, traffic."""
