"""Collating: prompts and records as batches of numpy arrays, one a row, padded on the right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from jaxrl_llm.data.formats import LabelledExample, PreferencePair, TokenExample
from jaxrl_llm.data.share import Mapped, Share
from jaxrl_llm.images import ImageInput
from jaxrl_llm.types import OfflineBatch, Prompt, RolloutBatch, TokenBatch


def pad_rows(
    rows: Sequence[Sequence[int | float]], length: int, fill: int | float, dtype: Any = np.int32
) -> np.ndarray:
    """[B, length]: each row followed by `fill`."""
    padded = np.full((len(rows), length), fill, dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def collate_prompts(
    prompts: Sequence[Prompt], *, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """(prompts [B, length] int32, prompt_lengths [B] int32)."""
    rows = [prompt.token_ids for prompt in prompts]
    return pad_rows(rows, length, pad_id), np.array([len(row) for row in rows], np.int32)


def collate_tokens(
    examples: Sequence[TokenExample], *, length: int, pad_id: int, images: ImageInput | None = None
) -> TokenBatch:
    """A TokenBatch of numpy arrays [B, length]. The loss mask is 0 at position 0."""
    rows = [example.token_ids for example in examples]
    mask = pad_rows([example.loss_mask for example in examples], length, 0, np.float32)
    mask[:, 0] = 0
    arrays: dict[str, Any] = {
        "tokens": pad_rows(rows, length, pad_id),
        "lengths": np.array([len(row) for row in rows], np.int32),
        "loss_mask": mask,
    }
    return TokenBatch(**arrays, **image_arrays(images, rows, examples, length))


def image_arrays(
    images: ImageInput | None,
    rows: Sequence[Sequence[int]],
    items: Sequence[TokenExample] | Sequence[Prompt],
    length: int,
) -> dict[str, Any]:
    """The fields of the images of rows of `length` tokens; {} without images."""
    return {} if images is None else images.arrays(rows, [x.images for x in items], length)


@dataclass(frozen=True)
class OfflineRecord:
    """One record of offline training. Rows and numbers are named as in OfflineBatch."""

    index: int  # in its data set
    rows: dict[str, TokenExample]
    numbers: dict[str, float]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of all rows, concatenated."""
        return tuple(token for row in self.rows.values() for token in row.token_ids)

    @property
    def answer(self) -> Any:
        """Its numbers, and which tokens count in the loss."""
        return self.numbers, [row.loss_mask for row in self.rows.values()]


def offline_records(
    items: Sequence[TokenExample] | Sequence[PreferencePair] | Sequence[LabelledExample],
    number: str = "labels",
) -> Sequence[OfflineRecord]:
    """Records of a data set. `number` is the OfflineBatch field for a LabelledExample's label.

    Of a `Share` they are made when they are asked for.
    """
    record = partial(_record, number=number)
    if isinstance(items, Share):
        return Mapped(items, record)
    return [record(i, item) for i, item in enumerate(items)]


def _record(
    index: int, item: TokenExample | PreferencePair | LabelledExample, number: str
) -> OfflineRecord:
    if isinstance(item, TokenExample):
        return OfflineRecord(index, {"completion": item}, {})
    if isinstance(item, PreferencePair):
        rows = {"chosen": item.chosen, "rejected": item.rejected}
        return OfflineRecord(index, rows, {"margins": item.margin})
    return OfflineRecord(index, {"completion": item.completion}, {number: item.label})


def collate_records(
    records: Sequence[OfflineRecord],
    *,
    length: int,
    pad_id: int,
    mismatched: bool = False,
    before: OfflineRecord | None = None,
    size: int = 0,
    rows: Sequence[int] | None = None,
    images: ImageInput | None = None,
) -> OfflineBatch:
    """An OfflineBatch of numpy arrays. Rows are [B, length].

    `mismatched` adds rows with the prompt of record i and the completion of record i - 1, truncated
    to `length`. The first record gets the completion of `before`, or of the last record if `before`
    is None. `size` pads the batch with copies of weight 0. `rows` are the rows of the
    batch to make, by default all; no other record is read.

    `mismatched` requires two records, or `before`. Else a record gets its own completion.
    """
    num = len(records)
    rows = range(max(num, size)) if rows is None else rows
    read = cache(records.__getitem__)  # a record may stand in two rows
    chosen = [read(row if row < num else 0) for row in rows]
    groups = {name: [record.rows[name] for record in chosen] for name in chosen[0].rows}
    if mismatched:

        def other(row: int) -> OfflineRecord:
            if row:
                return read(row - 1)
            return read(num - 1) if before is None else before

        groups["mismatched"] = [
            mismatch(own, other(row).rows["completion"], length) if row < num else own
            for row, own in zip(rows, groups["completion"], strict=True)
        ]
    numbers: dict[str, Any] = {
        name: np.array([record.numbers[name] for record in chosen], np.float32)
        for name in chosen[0].numbers
    }
    index: Any = np.array([record.index for record in chosen], np.int32)
    weights: Any = (np.asarray(rows) < num).astype(np.float32)
    return OfflineBatch(
        index=index,
        weights=weights,
        **{
            name: collate_tokens(rows, length=length, pad_id=pad_id, images=images)
            for name, rows in groups.items()
        },
        **numbers,
    )


def mismatch(prompt: TokenExample, answer: TokenExample, length: int) -> TokenExample:
    """The prompt of one example (up to its first token in the loss) and another's completion."""
    asked = prompt.token_ids[: prompt.loss_mask.index(1)]
    start = answer.loss_mask.index(1)
    ids = (*asked, *answer.token_ids[start:])[:length]
    mask = (*[0] * len(asked), *answer.loss_mask[start:])[:length]
    return TokenExample(token_ids=ids, loss_mask=mask, images=prompt.images)


def prompt_batch(
    prompts: Mapping[int, Prompt],
    rows: np.ndarray,
    *,
    n: int,
    max_prompt_length: int,
    pad_id: int,
    first_sample: int = 0,
    images: ImageInput | None = None,
) -> RolloutBatch:
    """numpy batch of these rows of n samples a prompt, group after group.

    `prompts` has the prompts by group. A group without one gets rows of length 0, which generate
    nothing. `first_sample` is the number of samples that the step has had before.
    """
    groups, group_of = np.unique(rows // n, return_inverse=True)
    none = Prompt(token_ids=(), text="")
    chosen = [prompts.get(group, none) for group in groups.tolist()]
    tokens, lengths = collate_prompts(chosen, length=max_prompt_length, pad_id=pad_id)
    # numpy arrays until the batch is placed on the mesh.
    ids = [prompt.token_ids for prompt in chosen]
    seen = image_arrays(images, ids, chosen, max_prompt_length)
    fields: dict[str, Any] = {name: array[group_of] for name, array in seen.items()} | {
        "prompts": tokens[group_of],
        "prompt_lengths": lengths[group_of],
        "sample_ids": (first_sample + rows).astype(np.uint32),
        "group_ids": groups[group_of].astype(np.int32),
    }
    return RolloutBatch(**fields)
