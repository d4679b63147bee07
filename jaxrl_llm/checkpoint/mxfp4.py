"""Reads experts that a file stores in four bits (MXFP4), as published files of gpt-oss have them.

A tensor NAME of their model is two in the file. `NAME_blocks` has two values a byte, the low half
first, in blocks of 32 along the inputs: uint8 [experts, outputs, blocks, 16]. `NAME_scales` has the
exponent of each block, plus 127: uint8 [experts, outputs, blocks]. The model has [experts, inputs,
outputs]. (Open Compute Project, Microscaling Formats 1.0.)
"""

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jaxrl_llm.checkpoint.safetensors_files import StoredTensor, is_finite

MXFP4 = "MXFP4"  # `StoredTensor.dtype` of a tensor that is stored so
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES, _BIAS, _NAN = 16, 127, 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) % 16], _VALUES[np.arange(256) // 16]], axis=-1)


def with_unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a file, with one tensor of dtype MXFP4 for the two that it consists of.

    It has the name and the shape of the model's tensor, and the path of the blocks.

    Raises: ValueError for blocks whose scales are missing or have another shape.
    """
    tensors = dict(stored)
    for name, blocks in stored.items():
        if not name.endswith(_BLOCKS) or blocks.dtype != "U8":
            continue
        whole = name.removesuffix(_BLOCKS)
        scales = tensors.pop(whole + _SCALES, None)
        if scales is None or (*scales.shape, _BLOCK_BYTES) != blocks.shape or scales.dtype != "U8":
            raise ValueError(
                f"tensor {name!r} of {blocks.path} has no scales that fit: {whole + _SCALES!r} is "
                f"{'missing' if scales is None else scales.shape}; fetch the model again"
            )
        E, outputs, count, _ = blocks.shape
        del tensors[name]
        shape = (E, 2 * _BLOCK_BYTES * count, outputs)
        tensors[whole] = StoredTensor(whole, shape, MXFP4, blocks.path)
    return tensors


def read_packed(
    tensors: Sequence[StoredTensor], stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and bfloat16 values of tensors from `with_unpacked(stored)`, one in memory at a time.

    Raises: ValueError for NaN, and for a value that bfloat16 cannot have; names file and tensor.
    """
    for tensor in tensors:
        blocks, scales = (_read(stored[tensor.name + part]) for part in (_BLOCKS, _SCALES))
        value = unpacked(blocks, scales)
        if (scales == _NAN).any() or not is_finite(value):
            raise ValueError(
                f"tensor {tensor.name!r} of {tensor.path} holds NaN or infinity: the file is "
                "damaged, or the weights are of a run that diverged; fetch it again"
            )
        yield tensor.name, value


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values [experts, inputs, outputs] in bfloat16, which has each finite one exactly.

    Scales near the largest give infinity.
    """
    E, outputs, count, _ = blocks.shape
    unpacked_EIO = np.empty((E, 2 * _BLOCK_BYTES * count, outputs), ml_dtypes.bfloat16)
    for expert in range(E):  # float32 of one expert at a time
        values = _PAIRS[blocks[expert]].reshape(outputs, count, 2 * _BLOCK_BYTES)
        exponents = scales[expert].astype(np.int32)[..., None] - _BIAS
        with np.errstate(over="ignore"):
            unpacked_EIO[expert] = np.ldexp(values, exponents).reshape(outputs, -1).T
    return unpacked_EIO


def _read(tensor: StoredTensor) -> np.ndarray:
    with safe_open(tensor.path, framework="numpy") as file:
        return file.get_tensor(tensor.name)
