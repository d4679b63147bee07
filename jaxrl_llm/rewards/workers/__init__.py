"""The processes in which functions of the user run, and what they and the trainer say.

`pool.py` is the trainer's side. It starts a `keeper.py`, which forks a `worker.py`. Messages are
built and checked in `messages.py`, and written in `wire.py`.
"""
