"""The device mesh. Its six named axes always exist, so one set of rules fits every size.

`data`, `fsdp`, `expert` and `pipeline` split the batch, and `sequence` the tokens of its rows.
`pipeline` also splits the layers, and `expert` the experts of a layer. `tensor` splits heads, the
inner MLP dim and the vocabulary. In training, `fsdp`, `expert`, `sequence` and `pipeline` also
split the stored weights.

A phase may lay the same devices out otherwise, for example with a larger tensor size. Then an axis
has several parts: "fsdp.0" and "fsdp.1" together are the axis fsdp, the outermost part first.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl_llm.config.schema import AXES, REPLICA_AXES, MeshAxis


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    *,
    sequence: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    cuts: Sequence[int] = (),
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of `data * pipeline * fsdp * expert * sequence * tensor` devices, all axes Auto.

    A cut is a number of neighbouring devices that some phase uses together. The axis inside which
    such a group ends is made of two parts, so that rules can name the group.

    A single process may leave devices unused; it takes the first ones. With several processes every
    device must be in the mesh, because each process must take part in the program.

    Raises: ValueError that names the size to change.
    """
    sizes: dict[MeshAxis, int] = {
        "data": data,
        "pipeline": pipeline,
        "fsdp": fsdp,
        "expert": expert,
        "sequence": sequence,
        "tensor": tensor,
    }
    available = list(jax.devices() if devices is None else devices)
    check_mesh(sizes, len(available), jax.process_count())
    parts = axis_parts(sizes, cuts)
    names, shape = tuple(parts), tuple(parts.values())
    wanted = math.prod(shape)
    axis_types = (AxisType.Auto,) * len(names)
    if wanted == len(available) and devices is None:
        # jax.make_mesh orders the devices by their links. It needs all devices for that.
        return jax.make_mesh(shape, names, axis_types=axis_types)
    return Mesh(np.asarray(available[:wanted]).reshape(shape), names, axis_types=axis_types)


def devices_of_nodes() -> list[list[int]]:
    """The numbers of the devices of each node, in `jax.devices()`. A node is a process."""
    numbers: list[list[int]] = [[] for _ in range(jax.process_count())]
    for number, device in enumerate(jax.devices()):
        numbers[device.process_index].append(number)
    return numbers


def axis_parts(sizes: Mapping[MeshAxis, int], cuts: Sequence[int] = ()) -> dict[str, int]:
    """Names and sizes of the axes' parts, outermost first.

    Raises: ValueError for a cut that does not end at a whole part of an axis.
    """
    inner, parts = 1, {}
    for axis in reversed(AXES):
        size = sizes.get(axis, 1)
        bounds = sorted({cut // inner for cut in cuts if inner < cut < inner * size})
        ends = [1, *bounds, size]
        exact = all(cut % inner == 0 for cut in cuts if inner < cut < inner * size)
        if not exact or any(b % a for a, b in zip(ends, ends[1:], strict=False)):
            raise ValueError(
                f"groups of {', '.join(map(str, sorted(cuts)))} neighbouring devices do not fit "
                f"into the mesh {named(sizes)}: choose sizes of which each divides the next."
            )
        widths = [b // a for a, b in zip(ends, ends[1:], strict=False)]
        for i, width in enumerate(widths):  # the innermost part has the largest number
            part = len(widths) - 1 - i
            parts[axis if len(widths) == 1 else f"{axis}.{part}"] = width
        inner *= size
    return dict(reversed(parts.items()))


def check_mesh(sizes: Mapping[MeshAxis, int], num_devices: int, num_processes: int = 1) -> None:
    """Raises: ValueError unless a mesh of these `sizes` fits. An axis without a size has 1."""
    shown = named(sizes)
    wanted = math.prod(sizes.values())
    seen = f"{num_devices} devices are available"
    if num_processes > 1:
        seen += f" ({num_processes} processes with {num_devices / num_processes:g} each)"
    remedy = f"{seen}; {larger_mesh(sizes, num_devices)} fits"
    if wanted > num_devices:
        raise ValueError(f"mesh {shown} needs {wanted} devices, but {remedy}.")
    if num_processes > 1 and wanted < num_devices:
        raise ValueError(
            f"mesh {shown} uses {wanted} devices, but with {num_processes} processes every device "
            f"must be in it: {remedy}."
        )


def larger_mesh(sizes: Mapping[Any, int], num_devices: int) -> str:
    """Flags of a mesh that uses all devices, with `data` changed only where that is possible."""
    others = {axis: size for axis, size in sizes.items() if axis != "data" and size > 1}
    split = math.prod(others.values())
    if num_devices % split:
        ones = "".join(f" --config.mesh.{axis}=1" for axis in others if axis != "fsdp")
        return f"--config.mesh.data=1 --config.mesh.fsdp={num_devices}{ones}"
    data = f"--config.mesh.data={num_devices // split}"
    return f"with {named(others)}, {data}" if others else data


def named(sizes: Mapping[Any, int]) -> str:
    """The sizes for a message. The axes of size 1 that few use are left out."""
    always = ("data", "fsdp", "tensor")
    shown = {axis: sizes[axis] for axis in AXES if axis in sizes}
    return ", ".join(f"{a}={n}" for a, n in shown.items() if n != 1 or a in always)


def parts_of(mesh: Mesh | AbstractMesh, *axes: str) -> tuple[str, ...]:
    """The parts of the mesh that make up these axes, each outermost first.

    A name that is a part itself stands for itself.
    """
    every = []
    for axis in axes:
        parts = [part for part in mesh.axis_names if axis in (part, part.partition(".")[0])]
        assert parts, f"{mesh.axis_names} and no axis {axis!r}"
        every += parts
    return tuple(every)


def axis_size(mesh: Mesh | AbstractMesh, *axes: str) -> int:
    """The product of the sizes of these axes."""
    return math.prod(mesh.shape[part] for part in parts_of(mesh, *axes))


def num_replicas(mesh: Mesh | AbstractMesh) -> int:
    """The number of parts that the batch is split into in training."""
    return axis_size(mesh, *REPLICA_AXES)
