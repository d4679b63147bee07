"""The dataflow, its planner, the compiled programs and the loop."""
