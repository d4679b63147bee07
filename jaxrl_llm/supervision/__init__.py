"""What watches over a run: its folder, disk, time, signals, alarms, traces and traffic."""
