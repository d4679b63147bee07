"""The devices that exchange data in a collective: XLA's text for them, and the mesh axes they span.

XLA writes groups of devices in three forms, and pairs of devices in a fourth:

    {{0,1},{2,3}}                                   every group
    [2,4]<=[4,2]T(1,0)                              2 groups of 4: iota(8), reshaped, transposed
    mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'b'}   axes of a mesh of its own
    {{0,1},{1,0}}                                   source and target, of a permutation

A number is a position in the mesh's flat array of devices, as jax assigns devices to a program.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OTHER = "other"  # axis of a group that no product of mesh axes gives
Groups = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """The axes of a mesh and their sizes. A part of an axis is called after it: "fsdp.1"."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def of_groups(self, groups: Groups) -> str:
        """The axes over which every group spreads, joined by "+"; empty for groups of one device.

        OTHER where a group is not a product of axes or of parts of them.
        """
        several = [group for group in groups if len(group) > 1]
        spans = {self._differing(group) for group in several}
        if len(spans) > 1 or not all(self._is_box(group) for group in several):
            return OTHER
        return self._named(spans.pop()) if spans else ""

    def of_pairs(self, pairs: Groups) -> str:
        """The axes along which a permutation moves data, joined by "+"; empty if along none."""
        axes = {axis for pair in pairs for axis in self._differing(pair)}
        return self._named(tuple(sorted(axes)))

    def _differing(self, devices: Sequence[int]) -> tuple[int, ...]:
        coordinates = np.unravel_index(np.asarray(devices), self.sizes)
        return tuple(axis for axis, at in enumerate(coordinates) if len(set(at.tolist())) > 1)

    def _is_box(self, devices: Sequence[int]) -> bool:
        coordinates = np.unravel_index(np.asarray(devices), self.sizes)
        return math.prod(len(set(at.tolist())) for at in coordinates) == len(set(devices))

    def _named(self, axes: Sequence[int]) -> str:
        return "+".join(dict.fromkeys(self.names[axis].partition(".")[0] for axis in axes))


def parse_pairs(text: str) -> Groups:
    """The groups or pairs of `{{0,1},{2,3}}`."""
    groups = re.findall(r"\{([\d, ]*)\}", text)
    return [[int(number) for number in group.split(",")] for group in groups if group.strip()]


def parse_groups(text: str, num_devices: int) -> Groups:
    """The groups of `replica_groups=`, in any of its forms; empty groups mean all devices."""
    if text.startswith("{"):
        return parse_pairs(text) or [list(range(num_devices))]
    if text.startswith("mesh["):
        return _mesh_groups(text)
    tiled = re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
    assert tiled is not None, f"replica_groups={text[:200]}"
    shape = _numbers(tiled[1])
    return _iota(tiled[2]).reshape(shape[0], -1).tolist()


def _mesh_groups(text: str) -> Groups:
    """The groups that some axes of XLA's own mesh span; `'a':(2)4` is a part of the axis `a`."""
    head, _, tail = text.partition("]")
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", head)]
    sizes, names = [size for _, size in axes], [name for name, _ in axes]
    ids = np.arange(math.prod(sizes))
    listed = re.search(r"device_ids=\(([^{]*?)\)\s*\{", tail)
    if listed is not None:
        ids = _device_ids(listed[1], ids.size)
    chosen = re.search(r"\{([^}]*)\}", tail)
    refs = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen[1] if chosen else "")
    # Every axis as three: before the chosen part, the part, after it.
    parts = {name: (1, size, 1) if (name, "", "") in refs else (size, 1, 1) for name, size in axes}
    for name, before, size in refs:
        if size:
            whole = dict(axes)[name]
            parts[name] = (int(before), int(size), whole // (int(before) * int(size)))
    dims = [part for name in names for part in parts[name]]
    # In the order in which the axes are named.
    inner = [3 * names.index(name) + 1 for name, _, _ in refs]
    outer = [dim for dim in range(len(dims)) if dim not in inner]
    arranged = ids.reshape(dims).transpose(*outer, *inner)
    return arranged.reshape(-1, math.prod(dims[dim] for dim in inner)).tolist()


def _device_ids(text: str, num_devices: int) -> np.ndarray:
    """`[4,2]T(1,0)`, or every id."""
    numbers = _numbers(text.partition("T")[0].strip("[]"))
    if len(numbers) == num_devices and sorted(numbers) == list(range(num_devices)):
        return np.array(numbers)
    return _iota(text)


def _iota(text: str) -> np.ndarray:
    """iota, reshaped to `[4,2]` and, where it says so, transposed by `T(1,0)`; flat."""
    dims, _, order = text.partition("T")
    shape = _numbers(dims.strip("[]"))
    array = np.arange(math.prod(shape)).reshape(shape)
    return (array.transpose(_numbers(order.strip("()"))) if order else array).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
