"""Rows of a trajectory: the contexts in which its turns were sampled.

A row is a prompt and what was sampled and observed behind it. A conversation that goes on is one
row. Another row begins where a program asks with other messages: it compacted its context, or asks
for a part of its task. With `config.rollout.earlier_thinking=fork` one also begins where the chat
template drops thinking that is in the row.

All rows of a trajectory have its reward, and so its advantage, and a group counts trajectories.
verifiers trains the branches of a rollout so, and Agent Lightning found that statistics over rows
favour long trajectories.

A batch has a trajectory as one sample. Its further rows stand behind the first one in its response,
each with its whole prompt, as ids that were observed. `Trajectory.row_starts` says where.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from jaxrl_llm.agents.trajectory import Row, Trajectory

Ids = tuple[int, ...]


def draws_of(own: Any, sample_id: int, count: int, ids: Ids) -> tuple[np.ndarray, str]:
    """The key of the draws behind these ids, uint32 [2], and a name for them.

    It follows from the sample's key, the ids, and how many rows or turns of the sample came before
    (`count`), never from a clock.
    """
    parts = np.asarray(own, np.uint32).tobytes(), sample_id, count, ids
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    return np.frombuffer(digest.digest()[:8], np.uint32), digest.hexdigest()


def joined(trajectories: Sequence[Trajectory], *, most_prompt: int, most: int) -> list[Trajectory]:
    """The trajectories with the ids of their rows. Those of a group have one prompt.

    The prompt is what all first rows of the group begin with, at most `most_prompt` ids. What a
    first row's prompt has further belongs to the response, as an observation. Where a response
    would be longer than `most`, its earliest rows are left out. Where the last row alone is too
    long, its end is left out: to drop the sample would favour short answers.
    """
    rows = [[*trajectory.rows] for trajectory in trajectories]
    while True:
        prompts: dict[int, Ids] = {}
        for trajectory, own in zip(trajectories, rows, strict=True):
            for first in own[:1]:
                known = prompts.get(trajectory.group, first.prompt)
                prompts[trajectory.group] = _common(known, first.prompt)[:most_prompt]
        too_long = [
            own
            for trajectory, own in zip(trajectories, rows, strict=True)
            if len(own) > 1 and _length(own) - len(prompts[trajectory.group]) > most
        ]
        if not too_long:
            break
        for own in too_long:
            del own[0]
    return [
        _joined(trajectory, own, prompts[trajectory.group], most) if own else trajectory
        for trajectory, own in zip(trajectories, rows, strict=True)
    ]


def _common(one: Sequence[int], other: Sequence[int]) -> Ids:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(i for i, _ in pairs)


def _length(rows: Sequence[Row]) -> int:
    return sum(len(row.prompt) + len(row.response) for row in rows)


def _joined(trajectory: Trajectory, rows: Sequence[Row], prompt: Ids, most: int) -> Trajectory:
    """The rows one behind the other. A turn that several have was sampled in the first of them."""
    if not prompt:
        raise ValueError(
            "config.rollout: the prompts of two samples of one row of data differ from their first "
            "token on; begin them with the same text"
        )
    ids, mask, logprobs, turns, starts = [], [], [], [], []
    messages, seen = [*trajectory.messages], set[int]()
    for number, row in enumerate(rows):
        starts += [len(ids)] if number else []
        rest = row.prompt if number else row.prompt[len(prompt) :]
        own_mask, own_logprobs, place = [*row.mask], [*row.logprobs], len(ids) + len(rest)
        for turn in row.turns:
            if id(turn) in seen:
                length = turn.end - turn.start
                own_mask[turn.start : turn.end] = [0] * length
                own_logprobs[turn.start : turn.end] = [0.0] * length
                continue
            seen.add(id(turn))
            moved = replace(
                turn,
                start=turn.start + place,
                end=min(turn.end + place, most),
                message=turn.message + len(messages) if row.messages else turn.message,
            )
            turns += [moved] if moved.start < most else []
        ids += [*rest, *row.response]
        mask += [*[0] * len(rest), *own_mask]
        logprobs += [*[0.0] * len(rest), *own_logprobs]
        messages += row.messages
    return replace(
        trajectory,
        prompt_ids=prompt,
        response_ids=tuple(ids[:most]),
        mask=tuple(mask[:most]),
        logprobs=tuple(logprobs[:most]),
        turns=tuple(turns),
        messages=tuple(messages),
        row_starts=tuple(starts),
        shortened=len(ids) > most,
        rows=tuple(rows),
    )
