"""The processes in which functions of the user run.

`process.py` is the trainer's end of one. Of reward functions, `pool.py` is the trainer's side and
`worker.py` a worker. They exchange pickled messages.
"""
