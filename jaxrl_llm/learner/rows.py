"""Samples as rows of tokens, padded or packed, for a forward pass; its results as samples again.

A padded row is one sample: its prompt, then at once its response. A packed row holds as many
samples as fit into its tokens. A prompt that several of them answer is in it once, and each
response sees the prompt and itself. Results of response tokens come back as [B, R], in the order of
the samples, in both cases. So no loss depends on the kind of row.

Strict rows (`align` is given) have the form in which generation computes a sample. The prompt
without its last token is one run of tokens. That token begins the run of the response. The last
token of the response is in no run, because it predicts nothing. Runs begin at multiples of `align`,
so that attention adds up the same blocks of keys in every row.

Shape letters: B samples, P prompt, R response, T tokens of a row, X predicted tokens of a row,
D replicas of the mesh, S samples of a replica (B = D * S).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm.distributed.communication import MICRO_BATCHES
from jaxrl_llm.kernels.flash_attention import Visibility, token_order
from jaxrl_llm.models.media import Media, images_in, media_of

Fields = dict[str, Any]  # a batch by the names of its fields
ROWS = "rows"  # the field under which packed rows travel
ROUTES = "rollout_routes"  # the field of the experts that the sampler chose, [B, P + R, L, K]
KEPT = "rollout_kept"  # the field of the tokens that the sampler's filters kept, [B, R, K]
ROW_STARTS = "row_starts"  # the field of the rows of trajectories, [B, R]: see types.py
SAMPLE_ROWS = ("prompts", "prompt_lengths", "responses", "response_lengths")  # parts of a row


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Ranges:
    """The bounds of attention in a packed row, all int32 [D, T].

    Tokens may be in another order than in the row: then `token` has their positions in the row.
    """

    start: Int[Array, "D T"]  # first token of the run of tokens that a token belongs to
    position: Int[Array, "D T"]  # in its sample's sequence
    prefix_start: Int[Array, "D T"]  # first token of a prompt that is not part of the run
    prefix_end: Int[Array, "D T"]
    token: Int[Array, "D T"] | None = None

    def visibility(self, window: int | None, *, shared: bool) -> Visibility:
        """Causal within the run and over the prompt. A window counts positions of the sequence."""
        if window is None:
            start, prefix_start = self.start, self.prefix_start
        else:
            token = jnp.arange(self.start.shape[1]) if self.token is None else self.token
            start = jnp.maximum(self.start, token - window + 1)
            hidden = jnp.maximum(self.position - window + 1, 0)
            prefix_start = jnp.minimum(self.prefix_start + hidden, self.prefix_end)
        if not shared:
            return Visibility(start_BT=start, last_BT=self.token)
        return Visibility(
            start_BT=start,
            prefix_start_BT=prefix_start,
            prefix_end_BT=self.prefix_end,
            last_BT=self.token,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of tokens for one forward pass. Built by `padded_rows` and `packed_rows`.

    `spread` puts tokens and targets into another order. Results come back as samples all the same.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    predictors: Int[Array, "B X"]  # the token of the row whose hidden state predicts the target
    targets: Int[Array, "B X"]
    included: Bool[Array, " B"]  # the samples that are in these rows
    # For packed rows only. They have as many targets as tokens; targets in responses come first.
    num_targets: Int[Array, " B"] | Int[Array, "B parts"] | None = None  # targets in responses
    # The token of the row that the target is; in strict rows the one that predicts it.
    target_tokens: Int[Array, "B X"] | None = None
    ranges: Ranges | None = None
    # The number of the target's sample within its replica; S outside of responses.
    sample: Int[Array, "B X"] | None = None
    column: Int[Array, "B X"] | None = None
    real: Bool[Array, "B T"] | None = None  # False for padding; None where all are real
    source: Int[Array, "B T"] | None = None  # the sample of a packed token, within its replica
    place: Int[Array, "B T"] | None = None  # its place in [prompt, response] of its sample
    routes: Int[Array, "B T L K"] | None = None  # its experts; -1 leaves them to the router
    media: Media | None = None  # images of a row, and the places of their features in it
    response_length: int = field(metadata={"static": True})
    shared: bool = field(default=False, metadata={"static": True})
    rows_of_replica: int = field(default=1, metadata={"static": True})  # in a packed pass
    parts: int = field(default=1, metadata={"static": True})  # to which the targets were dealt

    def spread(self, *, parts: int, shards: int) -> "Rows":
        """The rows for devices of which each computes a part of their tokens.

        Tokens are in `token_order`. Targets are dealt to the parts in turns, because targets in
        responses come first. Both are padded: tokens to equal shards of equal parts.
        """
        length = self.tokens.shape[1]
        multiple = np.lcm(2 * parts if parts > 1 else 1, shards)
        padded = int(-(-length // multiple) * multiple)
        if parts == 1 and padded == length:
            return self
        order = token_order(padded, parts)
        inverse = jnp.asarray(np.argsort(order))

        def ordered(x: Array, fill: int = 0) -> Array:
            x = jnp.pad(x, ((0, 0), (0, padded - length)), constant_values=fill)
            return x if parts == 1 else x[:, order]

        def dealt(x: Array | None, fill: Any = 0) -> Any:
            if x is None or parts == 1:
                return x
            added = jnp.broadcast_to(fill, (x.shape[0], -x.shape[1] % parts)).astype(x.dtype)
            return _deal(jnp.concatenate([x, added], axis=1), parts)

        own, num = self.target_tokens, self.num_targets
        if own is None:
            own = jnp.minimum(self.predictors + 1, length - 1)
        if num is not None and parts > 1:
            num = -(-(num[:, None] - jnp.arange(parts)) // parts)
        # Out of range and all different, as for the tokens outside of responses.
        rows, added = self.rows_of_replica, -self.targets.shape[1] % parts
        num_samples = self.included.shape[0] // (self.tokens.shape[0] // rows)
        no_sample = num_samples + rows * length + jnp.arange(added)
        if rows > 1:
            no_sample += added * (jnp.arange(self.tokens.shape[0]) % rows)[:, None]
        return replace(
            self,
            tokens=ordered(self.tokens),
            positions=ordered(self.positions),
            real=None if self.real is None else ordered(self.real),
            routes=None if self.routes is None else _each(ordered, self.routes),
            media=None if self.media is None else self.media.ordered(ordered),
            predictors=dealt(inverse[self.predictors]),
            targets=dealt(self.targets),
            num_targets=num,
            target_tokens=dealt(inverse[own]),
            ranges=self._ordered_ranges(ordered, order if parts > 1 else None),
            sample=dealt(self.sample, no_sample),
            column=dealt(self.column),
            parts=parts,
        )

    def with_routes(self, routes: Int[Array, "N S L K"]) -> "Rows":
        """The rows with the experts of their tokens; `routes` has all samples."""
        assert self.place is not None and self.real is not None
        chosen = self._of_samples(routes, jnp.minimum(self.place, routes.shape[1] - 1))
        return replace(self, routes=jnp.where(self.real[..., None, None], chosen, -1))

    def in_own_rows(self, starts: Int[Array, "N R"], num_prompt: int) -> "Rows":
        """The rows where the response of a sample has further rows; `starts` has all samples.

        A token of a further row sees this row alone. Positions begin again there.
        """
        assert self.place is not None
        column = self.place - num_prompt
        start = self._of_samples(starts, jnp.clip(column, 0, starts.shape[1] - 1))
        further = (column >= 0) & (start >= 0)
        positions = jnp.where(further, column - start, self.positions)
        ranges, token = self._all_ranges, jnp.arange(self.tokens.shape[1])
        ranges = Ranges(
            start=jnp.where(further, token - positions, ranges.start),
            position=positions,
            prefix_start=jnp.where(further, 0, ranges.prefix_start),
            prefix_end=jnp.where(further, 0, ranges.prefix_end),
        )
        return replace(self, positions=positions, ranges=ranges)

    def _of_samples(self, x: Shaped[Array, "N S *rest"], at: Int[Array, "B T"]) -> Array:
        """The entry at `at` of the sample of each token; `x` has all samples."""
        if self.source is None:
            return jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)
        num_replicas = self.tokens.shape[0] // self.rows_of_replica
        by_replica = x.reshape(num_replicas, -1, *x.shape[1:])
        chosen = jax.vmap(lambda x, sample, at: x[sample, at])(
            by_replica, self._of_replica(self.source), self._of_replica(at)
        )
        return chosen.reshape(*at.shape, *x.shape[2:])

    @property
    def _all_ranges(self) -> Ranges:
        """The ranges, also of causal rows."""
        none = jnp.zeros_like(self.tokens)
        return self.ranges or Ranges(
            start=none, position=self.positions, prefix_start=none, prefix_end=none
        )

    def with_images(self, fields: Fields) -> "Rows":
        """The rows with the images of `fields`, which have all samples; without any, as they are.

        A row has each image once, and room for as many images as fit into its tokens.
        """
        images = images_in(fields)
        if images is None:
            return self
        assert self.place is not None
        real = jnp.ones_like(self.tokens, bool) if self.real is None else self.real
        if self.source is None:  # one sample a row
            source = jnp.broadcast_to(jnp.arange(len(self.tokens))[:, None], self.tokens.shape)
        else:  # counted over all replicas
            replica = jnp.arange(len(self.tokens)) // self.rows_of_replica
            num_replicas = len(self.tokens) // self.rows_of_replica
            source = self.source + replica[:, None] * (len(images.pixels_NIncq) // num_replicas)
        tokens = (source, self.place, self.positions, real)
        samples = 1 if self.source is None else None
        return replace(self, media=media_of(images, *tokens, samples=samples))

    def _ordered_ranges(
        self, ordered: Callable[..., Array], order: np.ndarray | None
    ) -> Ranges | None:
        if self.ranges is None and order is None:
            return None
        ranges = self._all_ranges
        start = ordered(ranges.start, fill=np.iinfo(np.int32).max)  # past every token
        token = None if order is None else jnp.broadcast_to(order.astype(np.int32), start.shape)
        return Ranges(
            start=start,
            position=ordered(ranges.position),
            prefix_start=ordered(ranges.prefix_start),
            prefix_end=ordered(ranges.prefix_end),
            token=token,
        )

    def visibility(self, window: int | None, ranges: Ranges | None = None) -> Visibility | None:
        """The keys that attention may see; None for causal rows, whose window is an argument.

        `ranges` are the ranges of some of the rows; None takes all.
        """
        ranges = ranges or self.ranges
        return None if ranges is None else ranges.visibility(window, shared=self.shared)

    def visible_pairs(self, window: int | None) -> Float[Array, "B parts"]:
        """The number of keys that the queries of each part see together, after `spread`."""
        visibility = self.visibility(window)
        assert visibility is not None and visibility.last_BT is not None
        seen = jnp.maximum(visibility.last_BT - visibility.start_BT + 1, 0)
        if visibility.prefix_start_BT is not None and visibility.prefix_end_BT is not None:
            seen += jnp.maximum(visibility.prefix_end_BT - visibility.prefix_start_BT, 0)
        # A long row has more pairs than an int32 holds.
        by_part = seen.astype(jnp.float32).reshape(seen.shape[0], self.parts, -1)
        return by_part.sum(axis=2)

    def predicting(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B X D"]:
        """The hidden state before each target."""
        return jnp.take_along_axis(hidden, self.predictors[..., None], axis=1)

    def to_samples(self, x: Float[Array, "B X"]) -> Float[Array, "B R"]:
        """One value a target as [B, R]; 0 for samples that are not in these rows."""
        if self.sample is None:
            return x if self.parts == 1 else _deal_back(x, self.parts)[:, : self.response_length]
        return self._scatter(x)

    def to_samples_each(self, x: Shaped[Array, "B X K"]) -> Shaped[Array, "B R K"]:
        """`to_samples` of K values a target."""
        if self.sample is None and self.parts == 1:
            return x
        return jax.vmap(self.to_samples, in_axes=-1, out_axes=-1)(x)

    def at_targets(self, x: Shaped[Array, "B R K"]) -> Shaped[Array, "B X K"]:
        """Values of response tokens in the order of the targets; any value elsewhere."""
        if self.sample is None:
            if self.parts == 1:
                return x
            added = ((0, 0), (0, -x.shape[1] % self.parts), (0, 0))
            return _deal(jnp.pad(x, added), self.parts)
        assert self.column is not None
        num_replicas = self.tokens.shape[0] // self.rows_of_replica
        samples = x.reshape(num_replicas, -1, *x.shape[1:])
        values = jax.vmap(lambda x, sample, column: x.at[sample, column].get(mode="clip"))(
            samples, self._of_replica(self.sample), self._of_replica(self.column)
        )
        return values.reshape(*self.sample.shape, *values.shape[2:])

    def own(self, x: Float[Array, "B T"]) -> Float[Array, "B R"]:
        """A value of every token of the rows, read at the response tokens, as [B, R].

        Requires: rows that are not strict, which hold no last token of a response.
        """
        if self.target_tokens is None:
            index = jnp.minimum(self.predictors + 1, x.shape[1] - 1)
            return jnp.take_along_axis(x, index, axis=1)
        return self.to_samples(jnp.take_along_axis(x, self.target_tokens, axis=1))

    def _scatter(self, x: Array) -> Array:
        assert self.sample is not None and self.column is not None
        num_replicas = self.tokens.shape[0] // self.rows_of_replica
        num_samples = self.included.shape[0] // num_replicas

        def one(x_T: Array, sample_T: Array, column_T: Array) -> Array:
            empty = jnp.zeros((num_samples, self.response_length), x.dtype)
            return empty.at[sample_T, column_T].set(x_T, mode="drop", unique_indices=True)

        arrays = (self._of_replica(x) for x in (x, self.sample, self.column))
        return jax.vmap(one)(*arrays).reshape(-1, self.response_length)

    def _of_replica(self, x: Array) -> Array:
        """The rows of each replica one after the other: [B, T] as [D, rows * T]."""
        return x if self.rows_of_replica == 1 else x.reshape(-1, self.rows_of_replica * x.shape[1])


def _each(ordered: Callable[..., Array], x_BTLK: Array) -> Array:
    """`ordered` of each number of a token, padded with -1."""
    numbers = x_BTLK.reshape(*x_BTLK.shape[:2], -1)
    moved = jax.vmap(lambda x: ordered(x, fill=-1), in_axes=-1, out_axes=-1)(numbers)
    return moved.reshape(*moved.shape[:2], *x_BTLK.shape[2:])


def _deal(x_BX: Array, parts: int) -> Array:
    """Part after part, of which part p gets entries p, p + parts, and so on."""
    B, X, *rest = x_BX.shape
    return x_BX.reshape(B, X // parts, parts, *rest).swapaxes(1, 2).reshape(x_BX.shape)


def _deal_back(x_BX: Array, parts: int) -> Array:
    """The inverse of `_deal`."""
    return _deal(x_BX, x_BX.shape[1] // parts)


def sample_fields(
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
    response_lengths: Int[Array, " B"],
) -> Fields:
    """The fields of rows, by name."""
    parts = (prompts, prompt_lengths, responses, response_lengths)
    return dict(zip(SAMPLE_ROWS, parts, strict=True))


def padded_rows(
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
    align: int | None = None,
    response_lengths: Int[Array, " B"] | None = None,
) -> Rows:
    """One row a sample, prompt + response without a gap, padded on the right.

    Padding follows the response, so causal attention hides it from every real token. With `align`
    rows are strict. Without `response_lengths` all tokens count as real.
    """
    if align is not None:
        return _strict_rows(prompts, prompt_lengths, responses, align, response_lengths)
    num_prompt, num_response = prompts.shape[1], responses.shape[1]
    position = jnp.arange(num_prompt + num_response)
    from_prompt = jnp.broadcast_to(
        jnp.minimum(position, num_prompt - 1), (prompts.shape[0], position.size)
    )
    offset = jnp.clip(position - prompt_lengths[:, None], 0, num_response - 1)
    tokens = jnp.where(
        position < prompt_lengths[:, None],
        jnp.take_along_axis(prompts, from_prompt, axis=1),
        jnp.take_along_axis(responses, offset, axis=1),
    )
    before = prompt_lengths[:, None] - 1 + jnp.arange(num_response)
    real = None
    if response_lengths is not None:
        real = position < (prompt_lengths + response_lengths)[:, None]
    return Rows(
        tokens=tokens,
        positions=jnp.broadcast_to(position, tokens.shape),
        predictors=jnp.maximum(before, 0),
        targets=responses,
        included=jnp.ones(prompts.shape[0], bool),
        real=real,
        place=jnp.where(position < prompt_lengths[:, None], position, num_prompt + offset),
        response_length=num_response,
    )


def _strict_rows(
    prompts: Array,
    prompt_lengths: Array,
    responses: Array,
    align: int,
    response_lengths: Array | None,
) -> Rows:
    (B, P), R = prompts.shape, responses.shape[1]
    run = _rounded_up(P - 1, align)  # where the run of the response begins
    token_T = jnp.arange(run + R)
    in_run_T, offset_T = token_T >= run, token_T - run
    before_B1 = jnp.maximum(prompt_lengths - 1, 0)[:, None]  # tokens of the prompt's run
    of_prompt_BT = jnp.where(in_run_T, before_B1, jnp.minimum(token_T, P - 1))
    of_response_BT = jnp.broadcast_to(jnp.clip(offset_T - 1, 0, R - 1), (B, token_T.size))
    real_BT = in_run_T | (token_T < before_B1)
    positions_BT = jnp.where(in_run_T, before_B1 + offset_T, jnp.where(real_BT, token_T, 0))
    start_T = jnp.where(in_run_T, run, 0)
    known_BT = None
    if response_lengths is not None:
        last_BT = (offset_T == 0) & (prompt_lengths > 0)[:, None]  # the prompt's last token
        known_BT = real_BT & (~in_run_T | last_BT | (offset_T < response_lengths[:, None]))
    return Rows(
        tokens=jnp.where(
            token_T > run,
            jnp.take_along_axis(responses, of_response_BT, axis=1),
            jnp.where(real_BT, jnp.take_along_axis(prompts, of_prompt_BT, axis=1), 0),
        ),
        positions=positions_BT,
        predictors=jnp.broadcast_to(run + jnp.arange(R), (B, R)),
        targets=responses,
        included=jnp.ones(B, bool),
        ranges=Ranges(
            start=jnp.where(real_BT, start_T, token_T.size),
            position=positions_BT,
            prefix_start=jnp.zeros_like(positions_BT),
            prefix_end=jnp.where(in_run_T, before_B1, 0),
        ),
        real=known_BT,
        place=jnp.where(token_T > run, P + of_response_BT, of_prompt_BT),
        response_length=R,
        shared=True,
    )


def strict_tokens(prompt: int, response: int, align: int) -> int:
    """The tokens of a strict row that holds a prompt and a response of these lengths."""
    return _rounded_up(prompt - 1, align) + _rounded_up(response, align)


def _rounded_up(size: Any, multiple: int) -> Any:
    return -(-size // multiple) * multiple


def whole_rows(tokens: Int[Array, "B T"]) -> Rows:
    """One row a sequence of tokens, each of which is a target that the token before it predicts."""
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Rows(
        tokens=tokens,
        positions=position,
        predictors=jnp.maximum(position - 1, 0),
        targets=tokens,
        included=jnp.ones(tokens.shape[0], bool),
        response_length=tokens.shape[1],
    )


def rows_of(fields: Fields, align: int | None = None) -> Rows:
    """The rows of a part of a batch: its packed rows, or one row a sample (see `padded_rows`)."""
    rows = fields[ROWS] if ROWS in fields else _padded(fields, align)
    if ROW_STARTS in fields:
        rows = rows.in_own_rows(fields[ROW_STARTS], fields["prompts"].shape[1])
    rows = rows.with_images(fields)
    return rows.with_routes(fields[ROUTES]) if ROUTES in fields else rows


def _padded(fields: Fields, align: int | None) -> Rows:
    prompts, prompt_lengths, responses, lengths = (fields[name] for name in SAMPLE_ROWS)
    return padded_rows(prompts, prompt_lengths, responses, align, lengths)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """Where each sample is, for every replica: row after row, samples in their order.

    The block of a sample is its response. The block of a leader begins with the prompt. `starts` is
    the first token of a block, counted over all rows of the replica. Samples without a response
    have no tokens.
    """

    starts: Int[Array, "D S"]
    leaders: Int[Array, "D S"]  # the sample whose block holds the prompt; its own if it leads
    row: Int[Array, "D S"]
    num_rows: Int[Array, ""]  # the maximum over replicas; last rows of the others are empty
    row_tokens: int = field(metadata={"static": True})
    shared: bool = field(metadata={"static": True})
    rows_of_part: int = field(metadata={"static": True})  # rows of each replica in one pass
    align: int | None = field(default=None, metadata={"static": True})  # set for strict rows

    @property
    def num_parts(self) -> Int[Array, ""]:
        """The number of passes that compute all rows. Rows after the last are empty."""
        if self.rows_of_part == 1:
            return self.num_rows
        return (self.num_rows + self.rows_of_part - 1) // self.rows_of_part

    def use(
        self, prompt_lengths: Int[Array, " B"], response_lengths: Int[Array, " B"]
    ) -> Float[Array, ""]:
        """The share of tokens, over the rows of all replicas, that belong to a sample."""
        size = self.leaders.shape
        prompt_DS, response_DS = prompt_lengths.reshape(size), response_lengths.reshape(size)
        leads_DS = (self.leaders == jnp.arange(size[1])) & (response_DS > 0)
        if self.align is not None:  # a strict row has no last token of a response
            prompt_DS = prompt_DS - 1
        # A large batch has more tokens than an int32 holds.
        used_DS = (response_DS + jnp.where(leads_DS, prompt_DS, 0)).astype(jnp.float32)
        part = float(size[0] * self.row_tokens * self.rows_of_part)
        return used_DS.sum() / (part * self.num_parts)


def plan_packing(
    prompt_lengths: Int[Array, " B"],
    response_lengths: Int[Array, " B"],
    *,
    row_tokens: int,
    group: int,
    num_replicas: int,
    rows_of_part: int = 1,
    align: int | None = None,
) -> PackingPlan:
    """Fill rows of `row_tokens` tokens with samples in their order, each whole.

    `group` consecutive samples answer one prompt, which is in a row once; 1 gives every sample its
    own prompt. One pass computes `rows_of_part` rows of each replica. `align` makes rows strict
    and rounds `row_tokens` up.
    Requires: the longest prompt and the longest response together fit a row; see `strict_tokens`.
    """
    samples = prompt_lengths.shape[0] // num_replicas
    prompt_DS = prompt_lengths.reshape(num_replicas, samples)
    response_DS = response_lengths.reshape(num_replicas, samples)
    group_DS = (jnp.arange(prompt_lengths.shape[0]) // group).reshape(num_replicas, samples)
    if align is not None:
        row_tokens = _rounded_up(row_tokens, align)
        prompt_DS = _rounded_up(prompt_DS - 1, align)
        response_DS = _rounded_up(response_DS, align)
    starts, leaders, row = jax.vmap(lambda p, r, g: _plan_replica(p, r, g, row_tokens))(
        prompt_DS, response_DS, group_DS
    )
    return PackingPlan(
        starts=starts,
        leaders=leaders,
        row=row,
        num_rows=row.max() + 1,
        row_tokens=row_tokens,
        shared=group > 1 or align is not None,
        rows_of_part=rows_of_part,
        align=align,
    )


def _plan_replica(
    prompt_S: Array, response_S: Array, group_S: Array, row_tokens: int
) -> tuple[Array, Array, Array]:
    size = prompt_S.shape[0]
    index_S = jnp.arange(size)
    some_S = response_S > 0
    # Groups come in order, so the last group seen before a sample is the largest.
    seen_S = jax.lax.cummax(jnp.where(some_S, group_S, -1))
    before_S = jnp.concatenate([jnp.full(1, -1), seen_S[:-1]])
    first_S = some_S & (group_S != before_S)
    cost_S = jnp.where(some_S, response_S + jnp.where(first_S, prompt_S, 0), 0)
    total_S1 = jnp.concatenate([jnp.zeros(1, cost_S.dtype), jnp.cumsum(cost_S)])
    # A row that begins inside a group needs the group's prompt once more.
    again_S = jnp.where(some_S & ~first_S, prompt_S, 0)
    room_S = total_S1[:-1] + row_tokens - again_S
    next_S = jnp.searchsorted(total_S1, room_S, side="right") - 1
    next_S = jnp.maximum(next_S, index_S + 1)

    def walk(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        at, begins_S = carry
        return next_S[at], begins_S.at[at].set(True)

    with jax.named_scope(MICRO_BATCHES):  # one step a row, and a row a micro-batch
        _, begins_S = jax.lax.while_loop(
            lambda carry: carry[0] < size, walk, (jnp.int32(0), jnp.zeros(size, bool))
        )
    row_S = jnp.cumsum(begins_S) - 1
    begin_S = jax.lax.cummax(jnp.where(begins_S, index_S, 0))
    offset_S = total_S1[:-1] - total_S1[begin_S]
    offset_S += jnp.where(index_S > begin_S, again_S[begin_S], 0)
    leads_S = some_S & (first_S | begins_S)
    leader_S = jnp.maximum(jax.lax.cummax(jnp.where(leads_S, index_S, -1)), 0)
    return row_S * row_tokens + offset_S, leader_S, row_S


def packed_rows(
    plan: PackingPlan,
    part: Int[Array, ""],
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    responses: Int[Array, "B R"],
    response_lengths: Int[Array, " B"],
) -> Rows:
    """The rows of part number `part` of every replica: arrays are [D * rows of a part, T]."""
    num_replicas, num_samples = plan.starts.shape
    num_rows = plan.rows_of_part

    def by_replica(x: Array) -> Array:
        return x.reshape(num_replicas, num_samples, *x.shape[1:])

    def one(starts: Array, leaders: Array, *samples: Array) -> dict[str, Any]:
        if num_rows == 1:
            return _packed_row(plan, starts, leaders, part, *samples)
        rows = part * num_rows + jnp.arange(num_rows)
        return jax.vmap(lambda row: _packed_row(plan, starts, leaders, row, *samples))(rows)

    arrays = jax.vmap(one)(
        plan.starts,
        plan.leaders,
        *(by_replica(x) for x in (prompts, prompt_lengths, responses, response_lengths)),
    )
    if num_rows > 1:
        # Outside of responses, a token's number must also differ from the numbers in other rows.
        apart = plan.row_tokens * jnp.arange(num_rows)[:, None]
        sample = arrays["sample"]
        arrays["sample"] = jnp.where(sample < num_samples, sample, sample + apart)
        arrays = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
    part_of_sample = plan.row if num_rows == 1 else plan.row // num_rows
    included = (part_of_sample == part) & (by_replica(response_lengths) > 0)
    return Rows(
        **arrays,
        included=included.reshape(-1),
        response_length=responses.shape[1],
        shared=plan.shared,
        rows_of_replica=num_rows,
    )


def _packed_row(
    plan: PackingPlan,
    starts_S: Array,
    leaders_S: Array,
    row: Array,
    prompts_SP: Array,
    prompt_lengths_S: Array,
    responses_SR: Array,
    response_lengths_S: Array,
) -> dict[str, Any]:
    row_tokens, strictly = plan.row_tokens, plan.align is not None
    # Tokens of the prompt that begin the run of a response, whose last token is then left out.
    repeated = int(strictly)
    token_T = jnp.arange(row_tokens)
    base = row * row_tokens
    # The last of equal starts: a sample without a response has the same start as the next.
    sample_T = jnp.searchsorted(starts_S, base + token_T, side="right") - 1
    sample_T = jnp.maximum(sample_T, 0)
    leads_T = leaders_S[sample_T] == sample_T
    leader_T = leaders_S[sample_T]
    prompt_T = prompt_lengths_S[leader_T] - repeated
    start_T = starts_S[sample_T] - base
    offset_T = token_T - start_T
    room_T = prompt_T if plan.align is None else _rounded_up(prompt_T, plan.align)
    run_T = start_T + jnp.where(leads_T, room_T, 0)
    column_T = token_T - run_T  # the target's; the token itself is `repeated` columns earlier
    some_T = response_lengths_S[sample_T] > 0
    in_prompt_T = some_T & (token_T < run_T) & (offset_T < prompt_T)
    in_run_T = some_T & (column_T >= 0) & (column_T < response_lengths_S[sample_T])
    in_response_T = in_run_T & (column_T >= repeated)
    prompt_start_T = starts_S[leader_T] - base
    prompt_end_T = prompt_start_T + prompt_T

    last_column = responses_SR.shape[1] - 1
    own_column_T, target_column_T = (
        jnp.clip(column_T - behind, 0, last_column) for behind in (repeated, 0)
    )
    of_prompt_T = jnp.where(in_run_T, prompt_T, offset_T)  # a run may begin with its last token
    safe_offset_T = jnp.clip(of_prompt_T, 0, prompts_SP.shape[1] - 1)
    tokens_T = jnp.where(
        in_response_T,
        responses_SR[sample_T, own_column_T],
        jnp.where(in_prompt_T | in_run_T, prompts_SP[sample_T, safe_offset_T], 0),
    )
    targets_T = jnp.where(in_run_T, responses_SR[sample_T, target_column_T], 0)
    real_T = in_prompt_T | in_run_T
    positions_T = jnp.where(in_prompt_T, offset_T, prompt_T + column_T)
    positions_T = jnp.where(real_T, positions_T, 0)
    apart_T = in_run_T if strictly else in_run_T & ~leads_T
    first_T = jnp.where(in_run_T, run_T, start_T) if strictly else start_T
    none = jnp.zeros_like(token_T)
    num_samples = starts_S.shape[0]
    predictors_T = token_T
    if not strictly:
        predictors_T = jnp.where(column_T == 0, prompt_end_T - 1, token_T - 1)
    # Out of range and all different: a scatter drops them and has no duplicates.
    target_of_T = jnp.where(in_run_T, sample_T, num_samples + token_T)
    # The head computes only the targets of responses, which come first.
    target_X = jnp.argsort(~in_run_T, stable=True)
    return {
        "tokens": tokens_T,
        "positions": positions_T,
        "predictors": jnp.clip(predictors_T, 0, row_tokens - 1)[target_X],
        "targets": targets_T[target_X],
        "num_targets": in_run_T.sum(),
        "real": real_T,
        "source": sample_T,
        "place": jnp.where(in_response_T, prompts_SP.shape[1] + own_column_T, safe_offset_T),
        "target_tokens": target_X,
        "ranges": Ranges(
            start=jnp.where(real_T, first_T, row_tokens),
            position=positions_T,
            prefix_start=jnp.where(apart_T, prompt_start_T, none),
            prefix_end=jnp.where(apart_T, prompt_end_T, none),
        ),
        "sample": target_of_T[target_X],
        "column": jnp.where(in_run_T, column_T, 0)[target_X],
    }
