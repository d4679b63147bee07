"""A curriculum: the first batches hold prompts in the ascending order of a column.

The whole order is known before the first step, so a position in it is one number, and a resumed run
goes on exactly.

N is the number of prompts, B of those in a batch, S of the steps of the curriculum.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.share import Share, own_indices
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.references import nearest
from jaxrl_llm.types import Prompt

CURRICULUM_STREAM = 7  # stream of the random draws


def column_values(prompts: Sequence[Prompt], column: str) -> np.ndarray:
    """The number in `column` of every prompt, float64 [N]. `a.b` is the entry b of the column a.

    All processes must call it for a `Share`: each reads those that it keeps.

    Raises: ValueError where a prompt has no number there, with its row.
    """
    own = own_indices(prompts)
    numbers, error = [], ""
    for index in own:
        try:
            numbers.append((index, _number(prompts[index], column)))
        except ValueError as reason:
            error = str(reason)
            break
    everyone = [[numbers, error]]
    if isinstance(prompts, Share):
        everyone = gather_objects(everyone[0], "curriculum")
    first = next((reason for _, reason in everyone if reason), "")
    if first:
        raise ValueError(first)
    values = np.empty(len(prompts))
    for numbers, _ in everyone:
        for index, number in numbers:
            values[index] = number
    return values


def _number(prompt: Prompt, column: str) -> float:
    value: Any = prompt.columns
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = sorted(map(str, value)) if isinstance(value, Mapping) else []
            raise ValueError(
                f"config.data.curriculum={column}: row {prompt.row} of {prompt.data_source} has no "
                f"such column; it has {', '.join(known) or 'none'}{nearest(name, known)}"
            )
        value = value[name]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"config.data.curriculum={column}: row {prompt.row} of {prompt.data_source} has "
            f"{value!r} there, and prompts are ordered by a number"
        )
    return number


def ascending_batches(
    values: np.ndarray, *, batch_size: int, steps: int, seed: int, shuffle: bool
) -> np.ndarray:
    """Places of the prompts of the first S batches, int64 [S * B].

    Batch t holds B prompts of a window of the ascending order. The windows go from its beginning to
    its end in S steps. A window has N / S prompts, and B at least. With S = N / B all prompts come
    once. With fewer steps some are left out, and with more, neighbouring batches share some.
    `steps` 0 takes N / B, rounded up. `shuffle` draws from the window, and orders equal values, at
    random. Without it prompts of a window are spaced evenly, and equal values are in their order.
    """
    draw = np.random.default_rng((seed % 2**32, CURRICULUM_STREAM))
    num_prompts = len(values)
    ties = draw.permutation(num_prompts) if shuffle else np.arange(num_prompts)
    order = np.lexsort((ties, values))
    if num_prompts < batch_size:  # a batch holds prompts several times
        order = np.repeat(order, math.ceil(batch_size / num_prompts))
    steps = steps or math.ceil(num_prompts / batch_size)
    width = max(batch_size, math.ceil(len(order) / steps))
    batches = []
    for step in range(steps):
        start = step * (len(order) - width) // max(steps - 1, 1)
        if shuffle:
            within = draw.permutation(width)[:batch_size]
        else:
            within = np.arange(batch_size) * width // batch_size
        batches.append(order[start + within])
    return np.concatenate(batches)
