"""The device mesh: three named axes, always present, so that one set of rules fits every size.

`data` and `fsdp` both split the batch; `fsdp` also splits the stored weights in training;
`tensor` splits heads, the inner MLP dim and the vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

AXES = ("data", "fsdp", "tensor")
REPLICA_AXES = ("data", "fsdp")  # a replica of generation is one coordinate of these


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of `data * fsdp * tensor` devices whose axes are all of type Auto.

    One process may leave devices unused (the first ones are taken). Several processes may not:
    a process with no device in the mesh could not take part in the program. ValueError says which
    size to change.
    """
    sizes = (data, fsdp, tensor)
    available = list(jax.devices() if devices is None else devices)
    check_mesh(sizes, len(available), jax.process_count())
    wanted = math.prod(sizes)
    axis_types = (AxisType.Auto,) * len(AXES)
    if wanted == len(available) and devices is None:
        # make_mesh orders the devices by their links; that needs all of them.
        return jax.make_mesh(sizes, AXES, axis_types=axis_types)
    return Mesh(np.asarray(available[:wanted]).reshape(sizes), AXES, axis_types=axis_types)


def check_mesh(sizes: Sequence[int], num_devices: int, num_processes: int = 1) -> None:
    """ValueError unless a mesh of these `sizes` (in the order of AXES) fits the devices."""
    named = ", ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
    if any(size < 1 for size in sizes):
        raise ValueError(f"mesh {named}: every size must be 1 or more.")
    wanted = math.prod(sizes)
    rest = wanted // sizes[0]
    remedy = f"{num_devices} devices are available"
    if num_devices % rest == 0 and num_devices >= rest:
        remedy += f"; with fsdp={sizes[1]} and tensor={sizes[2]}, data={num_devices // rest} fits"
    else:
        remedy += f"; fsdp={num_devices} with data=1 and tensor=1 fits"
    if wanted > num_devices:
        raise ValueError(f"mesh {named} needs {wanted} devices, but {remedy}.")
    if num_processes > 1 and wanted < num_devices:
        raise ValueError(
            f"mesh {named} uses {wanted} devices, but with {num_processes} processes every device "
            f"must be in it: {remedy}."
        )


def num_replicas(mesh: Mesh | AbstractMesh) -> int:
    """How many parts the batch is split into: the product of the REPLICA_AXES."""
    return math.prod(mesh.shape[axis] for axis in REPLICA_AXES)
