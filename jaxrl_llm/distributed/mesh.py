"""The device mesh. Its three named axes always exist, so one set of rules fits every size.

`data` and `fsdp` split the batch. `fsdp` also splits the stored weights in training. `tensor`
splits heads, the inner MLP dim and the vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

MeshAxis = Literal["data", "fsdp", "tensor"]
AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)
# One coordinate of these axes is a replica: it holds a share of the batch.
REPLICA_AXES: tuple[MeshAxis, ...] = ("data", "fsdp")


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of `data * fsdp * tensor` devices; all axes have the type Auto.

    A single process may leave devices unused; it takes the first ones. With several processes every
    device must be in the mesh, because each process must take part in the program.

    Raises: ValueError that names the size to change.
    """
    sizes = (data, fsdp, tensor)
    available = list(jax.devices() if devices is None else devices)
    check_mesh(sizes, len(available), jax.process_count())
    wanted = math.prod(sizes)
    axis_types = (AxisType.Auto,) * len(AXES)
    if wanted == len(available) and devices is None:
        # jax.make_mesh orders the devices by their links. It needs all devices for that.
        return jax.make_mesh(sizes, AXES, axis_types=axis_types)
    return Mesh(np.asarray(available[:wanted]).reshape(sizes), AXES, axis_types=axis_types)


def check_mesh(sizes: Sequence[int], num_devices: int, num_processes: int = 1) -> None:
    """Raises: ValueError unless a mesh of these `sizes` (in the order of AXES) fits."""
    named = ", ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
    if any(size < 1 for size in sizes):
        raise ValueError(f"mesh {named}: every size must be 1 or more.")
    wanted = math.prod(sizes)
    seen = f"{num_devices} devices are available"
    if num_processes > 1:
        seen += f" ({num_processes} processes with {num_devices / num_processes:g} each)"
    remedy = f"{seen}; {larger_mesh(sizes, num_devices)} fits"
    if wanted > num_devices:
        raise ValueError(f"mesh {named} needs {wanted} devices, but {remedy}.")
    if num_processes > 1 and wanted < num_devices:
        raise ValueError(
            f"mesh {named} uses {wanted} devices, but with {num_processes} processes every device "
            f"must be in it: {remedy}."
        )


def larger_mesh(sizes: Sequence[int], num_devices: int) -> str:
    """Flags of a mesh that uses all devices, with `data` changed only where that is possible."""
    _, fsdp, tensor = sizes
    if num_devices % (fsdp * tensor):
        return f"--config.mesh.data=1 --config.mesh.fsdp={num_devices} --config.mesh.tensor=1"
    data = f"--config.mesh.data={num_devices // (fsdp * tensor)}"
    return data if fsdp * tensor == 1 else f"with fsdp={fsdp} and tensor={tensor}, {data}"


def num_replicas(mesh: Mesh | AbstractMesh) -> int:
    """How many parts the batch is split into."""
    return math.prod(mesh.shape[axis] for axis in REPLICA_AXES)
