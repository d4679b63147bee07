"""The processes in which reward functions of the user run.

`pool.py` is the trainer's side, and `worker.py` is a worker. They exchange pickled messages.
"""
