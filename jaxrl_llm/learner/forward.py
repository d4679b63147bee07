"""Forward passes over samples: log-probs, values and scores of responses.

Shape letters: B samples or rows, R response, T tokens of a row, D hidden.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.distributed.mesh import axis_size
from jaxrl_llm.kernels.flash_attention import (
    Implementation,
    attention,
    gathered,
    token_order,
)
from jaxrl_llm.kernels.gated_delta import Inputs, Runs, chunking_of, gated_delta
from jaxrl_llm.kernels.kept_logprob import KeptStatistics, kept_logprob
from jaxrl_llm.kernels.linear_logprob import linear_logprob, sum_squared_probs
from jaxrl_llm.kernels.linear_top_k import linear_logprobs_at, linear_top_k
from jaxrl_llm.kernels.mesh_split import MeshSplit, in_row_order
from jaxrl_llm.kernels.strict import Strict, strict_scope
from jaxrl_llm.learner.rows import Ranges, Rows, whole_rows
from jaxrl_llm.learner.train_state import CastAhead, Metrics, Params
from jaxrl_llm.models.attention import Attend, Mixers
from jaxrl_llm.models.base import ModelSpec, bind
from jaxrl_llm.models.casting import cast
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.experts import Routed, Routing
from jaxrl_llm.models.lora import DROPOUT, set_dropout
from jaxrl_llm.models.pipeline import Pipeline, PipelinedLayers

# Sums of `attention_work`. Their quotient is the balance of attention over the parts of rows.
LARGEST_PART, MEAN_PART = "attention pairs of the largest part", "attention pairs of the mean part"


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """Settings of a role's forward pass, whatever its loss."""

    dtype: str = "float32"
    attention: Implementation = "auto"
    remat: Remat = "none"
    scan_layers: bool = False
    residual_dtype: str = "float32"  # dtype of the residual stream; the sampler has float32
    gather: Callable[[Params], Params] = lambda params: params  # storage layout -> layout of use
    layout: Layout | None = None  # None on one device; kernels need it, XLA's operations do not
    pipeline: Pipeline | None = None  # None with one stage of layers
    strict: Strict | None = None  # results with the bits of a strict generation

    @property
    def align(self) -> int | None:
        """At which multiples runs of tokens begin in strict rows; None for other rows."""
        return None if self.strict is None else self.strict.align

    @property
    def rows_of_pass(self) -> int:
        """Packed rows of a replica in one pass."""
        return 1 if self.pipeline is None else self.pipeline.micro_batches

    @property
    def cast_ahead(self) -> CastAhead | None:
        """The cast of weights once an optimizer step; None: in each micro-batch.

        The copies live as long as the step. With rematerialisation memory is short, and its peak
        is late in the backward pass: at 7B the copies would take 9 GiB of a device, otherwise 4.
        """
        if self.remat not in ("none", "projections"):
            return None
        wide = self.layout is None and not self.scan_layers
        return CastAhead(dtype=self.dtype, float32_gradients=wide)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of the policy at each response token; None where one was not requested."""

    logprobs: Float[Array, "B R"]  # log-prob of the token itself
    entropy: Float[Array, "B R"] | None  # nats
    sum_squares: Float[Array, "B R"] | None  # squared probabilities, summed over the vocabulary
    at_candidates: Float[Array, "B R K"] | None  # log-probs of the candidates
    # The likeliest tokens, best first, and their log-probs; without a gradient.
    top: tuple[Int[Array, "B R K"], Float[Array, "B R K"]] | None
    routed: Routed | None = None  # what the routers of a mixture of experts did in these rows


def hidden_states(
    model: Any, tokens: Int[Array, "B T"], settings: ForwardSettings, rows: Rows | None = None
) -> Array:
    """Final hidden states [B, T, D] of a bound model. Attention is causal, or as `rows` say.

    With `rows`, they are in the order of its tokens; see `Rows.spread`.
    """
    return routed_states(model, tokens, settings, rows)[0]


def routed_states(
    model: Any, tokens: Int[Array, "B T"], settings: ForwardSettings, rows: Rows | None = None
) -> tuple[Array, Routed | None]:
    """`hidden_states`, and what the routers of a mixture of experts did."""
    layout = settings.layout
    if rows is None and layout is not None and layout.size("residual") > 1:
        rows = spread(whole_rows(tokens), layout)
        order = token_order(rows.tokens.shape[1], layout.size("tokens"))
        in_order = np.argsort(order)[: tokens.shape[1]]
        hidden, routed = routed_states(model, rows.tokens, settings, rows)
        return hidden[:, in_order], routed

    delta = model.decoder.config.delta

    def attend_in(bounds: tuple[Ranges | None, Runs | None], layout: Layout | None) -> Attend:
        (ranges, runs), split = bounds, None
        if layout is not None:
            rows_axes, tokens_axes, heads = map(layout.axes, ("batch", "tokens", "q_heads"))
            split = MeshSplit(rows=rows_axes, tokens=tokens_axes, heads=heads)

        def attend(
            q: Array,
            k: Array,
            v: Array,
            cache: None,
            *,
            window: int | None,
            sinks: Array | None = None,
            softcap: float | None = None,
        ):
            visibility = None if rows is None or ranges is None else rows.visibility(window, ranges)
            out = attention(
                q,
                k,
                v,
                window=window if visibility is None else None,
                visibility=visibility,
                split=split,
                sinks=sinks,
                softcap=softcap,
                implementation=settings.attention,
                strict=settings.strict,
            )
            return out, cache

        if delta is None or runs is None:
            return attend
        chunking = chunking_of(runs, delta.conv_size)

        def recur(inputs: Inputs, cache: None) -> tuple[Array, None]:
            return gated_delta(inputs, chunking, split), None

        return Mixers(attend, recur)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    positions = positions if rows is None else rows.positions
    media = None if rows is None else rows.media
    positions = positions if media is None else media.positions(positions)
    ranges = None if rows is None else rows.ranges
    bounds = (ranges, None if delta is None else _runs(tokens, rows, layout))
    routing = None
    if rows is not None and model.decoder.config.mixture is not None:
        routing = Routing(real_BT=rows.real, chosen_BTLK=rows.routes)
    run_layers = None
    if settings.pipeline is not None and layout and tokens.shape[0] % layout.num_replicas == 0:
        run_layers = PipelinedLayers(
            pipeline=settings.pipeline,
            layout=layout,
            config=model.decoder.config,
            attend_in=partial(attend_in, layout=layout.of_stage),
            rows=bounds,
            positions_BT=positions,
            routing=routing,
            remat=settings.remat,
            scan=settings.scan_layers,
        )
    scope = contextlib.nullcontext() if layout is None else layout.scope()
    with scope, strict_scope(settings.strict):
        hidden, _, routed = model.routed(
            tokens,
            positions,
            attend=attend_in(bounds, layout),
            remat=settings.remat,
            scan=settings.scan_layers,
            residual_dtype=settings.residual_dtype,
            run_layers=run_layers,
            routing=routing,
            media=media,
        )
    return hidden, routed


def _runs(tokens: Int[Array, "B T"], rows: Rows | None, layout: Layout | None) -> Runs:
    """The runs of consecutive tokens: whole rows, or the runs of packed rows.

    They are in the order of the row, whatever order `rows` have, and whole on every device.
    """
    if rows is None or (ranges := rows.ranges) is None:
        return Runs(jnp.zeros_like(tokens))
    runs = Runs(ranges.start)
    if rows.shared:
        runs = Runs(ranges.start, ranges.prefix_start, ranges.prefix_end)
    if layout is None or rows.parts == 1:
        return runs
    return jax.tree.map(
        lambda x: layout.constrain(in_row_order(x, rows.parts), "batch", None), runs
    )


def spread(rows: Rows, layout: Layout | None) -> Rows:
    """The rows in the order in which the devices of a layout compute their tokens."""
    if layout is None or layout.size("residual") == 1:
        return rows
    rows = rows.spread(parts=layout.size("tokens"), shards=layout.size("residual"))
    tokens, positions = (
        layout.constrain(x, "batch", "tokens") for x in (rows.tokens, rows.positions)
    )
    return replace(rows, tokens=tokens, positions=positions)


def attention_work(rows: Rows, spec: ModelSpec, settings: ForwardSettings) -> Metrics:
    """Sums over rows and layers: (query, key) pairs of the largest part of a row, and of the mean.

    {} unless rows are split over devices.
    """
    layout = settings.layout
    if layout is None or layout.size("tokens") == 1:
        return {}
    rows = spread(rows, layout)
    windows = Counter(spec.config.sliding_window)
    pairs = jnp.stack([n * rows.visible_pairs(window) for window, n in windows.items()]).sum(axis=0)
    return {LARGEST_PART: pairs.max(axis=1).sum(), MEAN_PART: pairs.mean(axis=1).sum()}


def prepare(spec: ModelSpec, params: Params, settings: ForwardSettings) -> Any:
    """The module to compute with. Casting comes first, so that a gather moves the smaller dtype."""
    key = params.get(DROPOUT)
    params = {name: part for name, part in params.items() if name != DROPOUT}
    model = bind(spec, settings.gather(cast(params, settings.dtype, spec.float32_head)))
    if key is not None:
        set_dropout(model, key)
    return model


def response_logprobs(
    params: Params,
    rows: Rows,
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
    temperature: float = 1.0,
    with_entropy: bool = False,
    kept: Int[Array, "B R K"] | None = None,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"] | None]:
    """Log-prob of each response token, and `with_entropy` the entropy there (nats).

    Requires: `temperature` and `kept` are the sampler's. Otherwise the ratio of the two log-probs
    compares different policies. A greedy rollout (0) is scored at 1.
    """
    statistics = response_statistics(
        params,
        rows,
        spec=spec,
        settings=settings,
        temperature=temperature,
        with_entropy=with_entropy,
        kept=kept,
    )
    return statistics.logprobs, statistics.entropy


def response_statistics(
    params: Params,
    rows: Rows,
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_squares: bool = False,
    candidates: Int[Array, "B R K"] | None = None,
    top_k: int = 0,
    kept: Int[Array, "B R K"] | None = None,
) -> "Statistics":
    """The requested statistics of the distribution that each response token was drawn from.

    With `kept` this is the softmax over these tokens, -1 for no token. Log-probs of `candidates`
    and of the likeliest tokens are of the whole softmax in any case.
    """
    model, layout = prepare(spec, params, settings), settings.layout
    rows = spread(rows, layout)
    every, routed = routed_states(model, rows.tokens, settings, rows)
    hidden = _predicting(rows, every, layout)
    weight, softcap = model.unembedding(), spec.config.logits_softcap
    temperature = temperature or 1.0
    logits = {"temperature": temperature, "softcap": softcap}
    squares, at_candidates, top = None, None, None
    if kept is None:
        logprobs, entropy = head_logprobs(
            hidden,
            weight,
            rows.targets,
            layout,
            lengths=rows.num_targets,
            temperature=temperature,
            with_entropy=with_entropy,
            softcap=softcap,
            strict=settings.strict,
        )
        if with_squares:
            run = partial(sum_squared_probs, **logits)
            squares = rows.to_samples(_by_part(run, layout, hidden, weight))
    else:
        narrow = _kept_statistics(hidden, weight, rows, kept, settings, **logits)
        logprobs = narrow.logprobs
        entropy = narrow.entropy if with_entropy else None
        squares = rows.to_samples(narrow.sum_squares) if with_squares else None
    if candidates is not None:
        run = partial(linear_logprobs_at, **logits)
        at_targets = _by_replica(run, layout, hidden, weight, rows.at_targets(candidates))
        at_candidates = rows.to_samples_each(at_targets)
    if top_k:
        run = partial(linear_top_k, k=top_k, **logits)
        ids, top_logprobs = _by_part(run, layout, hidden, weight)
        top = rows.to_samples_each(ids), rows.to_samples_each(top_logprobs)
    return Statistics(
        logprobs=rows.to_samples(logprobs),
        entropy=None if entropy is None else rows.to_samples(entropy),
        sum_squares=squares,
        at_candidates=at_candidates,
        top=top,
        routed=routed,
    )


def response_values(
    params: Params, rows: Rows, *, spec: ModelSpec, settings: ForwardSettings
) -> Float[Array, "B R"]:
    """Value of the state before each response token, float32."""
    model, layout = prepare(spec, params, settings), settings.layout
    rows = spread(rows, layout)
    hidden = hidden_states(model, rows.tokens, settings, rows)
    if layout is None or layout.size("residual") == 1:
        return rows.to_samples(model.scores(rows.predicting(hidden)))
    # Numbers are gathered, where hidden states would be: each device scores its own tokens.
    scores = _whole_rows(model.scores(hidden), layout)
    return rows.to_samples(jnp.take_along_axis(scores, rows.predictors, axis=1))


def response_scores(
    params: Params,
    rows: Rows,
    response_lengths: Int[Array, " B"],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> Float[Array, " B"]:
    """Reward model's score at the last token of the response, float32.

    0 for an empty response, and for samples that are not in these rows.
    """
    model = prepare(spec, params, settings)
    rows = spread(rows, settings.layout)
    scores = model.scores(hidden_states(model, rows.tokens, settings, rows))
    scores = _whole_rows(scores, settings.layout)
    last = jnp.where(rows.included, response_lengths, 0) - 1
    chosen = jnp.take_along_axis(rows.own(scores), jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    return jnp.where(last >= 0, chosen, 0.0)


def response_token_scores(
    params: Params, rows: Rows, *, spec: ModelSpec, settings: ForwardSettings
) -> Float[Array, "B R"]:
    """Scalar model's score at each response token, which it has seen; float32.

    Any value after the response; 0 for samples that are not in these rows.
    """
    model = prepare(spec, params, settings)
    rows = spread(rows, settings.layout)
    scores = model.scores(hidden_states(model, rows.tokens, settings, rows))
    return jnp.where(rows.included[:, None], rows.own(_whole_rows(scores, settings.layout)), 0.0)


def _whole_rows(scores: Float[Array, "B T"], layout: Layout | None) -> Array:
    """Scores of which some are read: inside a shard_map, all tokens of a row on its devices.

    There XLA ends the process where it has to partition the read.
    """
    if layout is None or not jax.sharding.get_abstract_mesh().manual_axes:
        return scores
    return layout.constrain(scores, "batch", None)


def row_logprobs(
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    spec: ModelSpec,
    settings: ForwardSettings,
) -> Float[Array, "B T"]:
    """Log-prob of each token given the tokens before it; 0 at position 0."""
    model = prepare(spec, params, settings)
    hidden = hidden_states(model, tokens, settings)[:, :-1]
    logprobs, _ = head_logprobs(
        hidden,
        model.unembedding(),
        tokens[:, 1:],
        settings.layout,
        softcap=spec.config.logits_softcap,
        strict=settings.strict,
    )
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def head_logprobs(
    hidden: Float[Array, "B X D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B X"],
    layout: Layout | None,
    *,
    lengths: Int[Array, " B"] | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    softcap: float | None = None,
    strict: Strict | None = None,
) -> tuple[Array, Array | None]:
    """`linear_logprob`, each replica on its own rows, each device on its part of their targets.

    The partitioner would reduce the weight's gradient over the replicas once a chunk. Here each
    replica sums its own, and one reduction follows. `lengths` are [B, parts] of targets that were
    dealt to parts.
    """

    def run(hidden: Array, weight: Array, targets: Array, lengths: Array | None) -> Any:
        return linear_logprob(
            hidden,
            weight,
            targets,
            lengths=lengths[:, 0] if lengths is not None and lengths.ndim > 1 else lengths,
            temperature=temperature,
            with_entropy=with_entropy,
            softcap=softcap,
            strict=strict,
        )

    return _by_replica(run, layout, hidden, weight, targets, lengths)


def _kept_statistics(
    hidden: Float[Array, "B X D"],
    weight: Float[Array, "V D"],
    rows: Rows,
    kept: Int[Array, "B R K"],
    settings: ForwardSettings,
    **logits: Any,
) -> KeptStatistics:
    """`kept_logprob` of the targets of rows; see `head_logprobs`."""

    def run(
        hidden: Array, weight: Array, targets: Array, ids: Array, lengths: Array | None
    ) -> KeptStatistics:
        if lengths is not None and lengths.ndim > 1:
            lengths = lengths[:, 0]
        strict = settings.strict
        return kept_logprob(hidden, weight, targets, ids, lengths=lengths, strict=strict, **logits)

    ids = rows.at_targets(kept)
    layout, targets = settings.layout, rows.targets
    return _by_replica(run, layout, hidden, weight, targets, ids, rows.num_targets)


def _predicting(rows: Rows, hidden: Float[Array, "B T D"], layout: Layout | None) -> Array:
    """The hidden state before each target [B, X, D], each part on its own device."""
    if layout is None or layout.size("residual") == 1:
        return rows.predicting(hidden)
    hidden = layout.constrain(hidden, "batch", "tokens", None)  # whole over heads
    if rows.parts == 1:
        return rows.predicting(hidden)
    replicas, tokens = _split_axes(layout, hidden.shape[0], rows.parts)

    def own(hidden: Array, predictors: Array) -> Array:
        return jnp.take_along_axis(gathered(hidden, tokens), predictors[..., None], axis=1)

    by_token = PartitionSpec(replicas, tokens)
    return jax.shard_map(
        own,
        mesh=layout.mesh,
        in_specs=by_token,
        out_specs=by_token,
        axis_names={*replicas, *tokens},
        check_vma=False,
    )(hidden, rows.predictors)


def _split_axes(
    layout: Layout, num_rows: int, num_targets: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that split rows and their targets; none where they do not divide."""
    parts = layout.size("tokens")
    replicas = () if num_rows % layout.num_replicas else layout.axes("batch")
    tokens = layout.axes("tokens") if parts > 1 and num_targets % parts == 0 else ()
    return replicas, tokens


def _by_part(run: Callable[..., Any], layout: Layout | None, hidden: Array, weight: Array) -> Any:
    """`run` without a gradient: by the partitioner, unless rows are split over devices."""
    if layout is None or layout.size("tokens") == 1:
        return run(hidden, weight)
    return _by_replica(run, layout, hidden, weight)


def _by_replica(
    run: Callable[..., Any],
    layout: Layout | None,
    hidden: Array,
    weight: Array,
    *row_arrays: Array | None,
) -> Any:
    if layout is None:
        return run(hidden, weight, *row_arrays)
    replicas, tokens = _split_axes(layout, *hidden.shape[:2])
    if not (replicas or tokens):
        return run(hidden, weight, *row_arrays)
    both = (*replicas, *tokens)
    by_token = PartitionSpec(replicas, tokens) if tokens else PartitionSpec(replicas)
    # One copy for each device that computes its own. Of one array for all, the gradient would be
    # summed inside the shard_map, and XLA's CPU compiler crashes on such a sum in bfloat16.
    copies = jnp.broadcast_to(weight, (axis_size(layout.mesh, *both), *weight.shape))
    return jax.shard_map(
        lambda hidden, weight, *row_arrays: run(hidden, weight[0], *row_arrays),
        mesh=layout.mesh,
        in_specs=(by_token, PartitionSpec(both), *[by_token] * len(row_arrays)),
        out_specs=by_token,
        axis_names=set(both),
        check_vma=False,
    )(hidden, copies, *row_arrays)
