"""The layers of a decoder as a pipeline: each stage holds some layers, and rows pass through.

The devices along the mesh axis `pipeline` are its stages. With L layers, P stages and v rounds the
layers form P * v groups; stage s holds the groups s, P + s, 2P + s, ... Rows are cut into
micro-batches. In each tick a stage computes one of its groups on one micro-batch and hands the
result to the next stage. P micro-batches travel together, a convoy: they go v times around the
ring, then the next convoy follows without a gap. So M micro-batches take M * v + P - 1 ticks, in
which each stage idles P - 1 times.

Outside of the layers, rows are spread over the stages as over replicas. Dense layers before the
experts' layers are outside too. A conveyor moves against the ring. It brings each micro-batch of a
convoy from its owner to the first stage, and its result from the last stage back.

Shape letters: B rows, T tokens, D hidden, P stages, C convoys, b rows of a micro-batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.distributed.sharding import LogicalAxis
from jaxrl_llm.models.attention import Attend
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Block, Remat, rematerialised, scanned
from jaxrl_llm.models.experts import Routed, Routing, nothing_routed
from jaxrl_llm.models.layers import over_sequence, rope_tables
from jaxrl_llm.models.lora import dropping_apart
from jaxrl_llm.models.weight import Weight

WEIGHT = "stage weight"  # checkpoint name of a layer's weights, taken from its stage's
ANY = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The sizes of a pipeline."""

    stages: int
    rounds: int = 1  # groups of layers that a stage holds
    micro_batches: int = 1  # micro-batches per stage and pass

    @property
    def ticks(self) -> int:
        """Steps of the schedule, one group of layers on one micro-batch each."""
        return self.stages * self.micro_batches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the ticks in which a stage idles."""
        return (self.stages - 1) / self.ticks

    def check(self, config: ModelConfig) -> None:
        """Raises: ValueError for layers that the stages cannot share evenly."""
        if getattr(config.vision, "deep_layers", ()):
            raise ValueError(
                f"config.mesh.pipeline={self.stages}: the first layers of this image model also "
                "add features of its images, and stages compute the same; take other axes"
            )
        first, groups = config.num_leading_layers, self.stages * self.rounds
        layers = config.num_layers - first
        if config.splits_alike(groups):
            return
        if layers % groups:
            which = f" {layers} layers of experts" if first else f" {layers}"
            raise ValueError(
                f"config.mesh.pipeline={self.stages} with config.mesh.pipeline_rounds="
                f"{self.rounds} makes {groups} groups of layers, which do not divide the model's"
                f"{which}"
            )
        raise ValueError(
            f"config.mesh.pipeline={self.stages}: stages compute the same rules, windows and rope "
            f"tables in the same order, and groups of {layers // groups} of this model's layers "
            "differ from each other"
        )

    def check_adapters(self, config: ModelConfig, layers: Mapping[str, Any]) -> None:
        """Raises: ValueError for `layers` by number whose groups have adapters of other modules."""
        kinds = [jax.tree.structure(layers[str(i)]) for i in range(config.num_layers)]
        kinds = kinds[config.num_leading_layers :]
        size = len(kinds) // (self.stages * self.rounds)
        if any(kind != kinds[i % size] for i, kind in enumerate(kinds)):
            raise ValueError(
                f"config.mesh.pipeline={self.stages}: stages have adapters of the same modules in "
                f"the same order, and groups of {size} of this model's layers differ; "
                "lora.targets=all-linear, names that every layer has, or config.mesh.pipeline=1 "
                "work"
            )


@dataclass(frozen=True, kw_only=True)
class PipelinedLayers:
    """Runs the layers of a decoder as a pipeline: `run_layers` of `Decoder.__call__`."""

    pipeline: Pipeline
    layout: Layout
    config: ModelConfig
    attend_in: Callable[[Any], Attend]  # attention in rows, of the arrays that describe them
    rows: Any  # arrays that describe the rows, each [B, ...]
    positions_BT: jax.Array
    routing: Routing | None
    remat: Remat
    scan: bool

    def __call__(
        self, layers: Sequence[Block], x_BTD: jax.Array
    ) -> tuple[jax.Array, Routed | None]:
        """The residual stream after all layers, and the statistics of each layer's router.

        Requires: the replicas of the layout divide the rows.
        """
        pipeline, layout = self.pipeline, self.layout
        stages = pipeline.stages
        each = x_BTD.shape[0] // layout.num_replicas
        pipeline = replace(pipeline, micro_batches=math.gcd(each, pipeline.micro_batches))
        axes = layout.axes("layers")
        slots, graphdefs = staged(layers, pipeline, layout)
        cut = partial(_by_stage, layout=layout, convoys=pipeline.micro_batches)
        x_PCbTD = cut(x_BTD)
        # Every stage reads the description of every micro-batch.
        of_rows = jax.tree.map(
            lambda x: _constrained(
                cut(x).swapaxes(0, 1), layout, None, None, layout.of_stage.axes("batch")
            ),
            (self.positions_BT, self.rows, self._routing(x_BTD)),
        )

        def run(stage_1: jax.Array, slots: Any, x_1CbTD: jax.Array, of_rows: Any) -> Any:
            def compute(item: _Item, x_bTD: jax.Array) -> tuple[jax.Array, Routed | None]:
                positions_bT, described, routing = jax.tree.map(
                    lambda x: _nth(x.reshape(-1, *x.shape[2:]), item.number), of_rows
                )
                routing = _routing_of_group(routing, item, pipeline)
                of_tick = jax.tree.map(_of_tick, slots, is_leaf=_is_weight)
                of_tick = dropping_apart(of_tick, item.number)
                rope = rope_tables(self.config, positions_bT)
                attend = self.attend_in(described)
                with layout.of_stage.for_layers():
                    return _group(
                        of_tick,
                        graphdefs,
                        item.turn,
                        over_sequence(x_bTD),
                        rope,
                        attend,
                        routing,
                        remat=self.remat,
                        scan=self.scan,
                    )

            outputs = _schedule(compute, stage_1[0], x_1CbTD[0], self._nothing(), pipeline, axes)
            return jax.tree.map(lambda x: x[None], outputs)

        by_stage = PartitionSpec(axes)
        y_PCbTD, routed = jax.shard_map(
            run,
            mesh=layout.mesh.abstract_mesh,
            in_specs=(by_stage, by_stage, by_stage, PartitionSpec()),
            out_specs=by_stage,
            axis_names=set(axes),
            check_vma=False,
        )(jnp.arange(stages), slots, x_PCbTD, of_rows)
        # [stages, rounds, layers of a group, ...] -> [layers, ...]
        routed = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[3:]), routed)
        return _by_row(y_PCbTD, layout), routed

    def _routing(self, x_BTD: jax.Array) -> Routing | None:
        """The routing, with a flag of every token."""
        if self.config.mixture is None:
            return None
        routing = self.routing or Routing()
        if routing.real_BT is not None:
            return routing
        return replace(routing, real_BT=jnp.ones(x_BTD.shape[:2], bool))

    def _nothing(self) -> Routed | None:
        """The sums of a stage before its first tick, [rounds, layers of a group, ...]."""
        if self.config.mixture is None:
            return None
        groups = self.pipeline.stages * self.pipeline.rounds
        size = self.config.num_expert_layers // groups
        return nothing_routed(self.config.mixture, self.pipeline.rounds, size)


class _Item(NamedTuple):
    """The work of a stage in a tick: one of its groups of layers on one micro-batch."""

    turn: jax.Array  # round: the number of the group in the stage
    stage: jax.Array
    number: jax.Array  # number of the micro-batch
    busy: jax.Array  # bool; False: the stage idles, and computes zeros


def _routing_of_group(routing: Routing | None, item: _Item, pipeline: Pipeline) -> Routing | None:
    """The routing [b, T, layers of the group, K] of an item. An idle stage has no real token."""
    if routing is None:
        return None
    assert routing.real_BT is not None
    real_bT, chosen = routing.real_BT & item.busy, routing.chosen_BTLK
    if chosen is not None:
        groups = pipeline.stages * pipeline.rounds
        by_group = chosen.reshape(*chosen.shape[:2], groups, -1, chosen.shape[-1])
        group = item.turn * pipeline.stages + item.stage
        chosen = _nth(jnp.moveaxis(by_group, 2, 0), group)
    return Routing(real_BT=real_bT, chosen_BTLK=chosen)


def _schedule(
    compute: Callable[[_Item, jax.Array], tuple[jax.Array, Routed | None]],
    stage: jax.Array,
    x_CbTD: jax.Array,
    routed: Routed | None,
    pipeline: Pipeline,
    axes: tuple[str, ...],
) -> tuple[jax.Array, Routed | None]:
    """The outputs of `compute(item, x)` for each micro-batch after all groups of layers.

    The arguments and the result belong to one stage: micro-batch c of stage p has the number
    c * P + p. Item i = t - s is what stage s does in tick t: the convoy i // (P * v), in it the
    round i % (P * v) // P and the micro-batch i % P. What routers did is added to `routed`.
    """
    P, v, C = pipeline.stages, pipeline.rounds, pipeline.micro_batches
    turn = P * v  # ticks between two convoys
    ring = [(s, s + 1) for s in range(P - 1)] + ([(P - 1, 0)] if v > 1 else [])
    against = [(s, s - 1) for s in range(1, P)]

    def advance(t: Any, carry: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The input of tick t, the conveyor, and the results: all that moves between ticks."""
        made, conveyor, results = carry
        fresh = (stage == 0) & (t % turn < P)
        x = jax.lax.select(fresh, conveyor, jax.lax.ppermute(made, axes, ring))
        finished = (stage == P - 1) & ((t - P) % turn >= turn - P)
        conveyor = jax.lax.select(finished, made, jax.lax.ppermute(conveyor, axes, against))
        return x, conveyor, results

    def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
        moving, routed = carry
        x, conveyor, results = advance(t, moving)
        if C > 1:
            # A convoy of results is complete at its owners P - 1 ticks after the next one begins.
            # Until then the slot C takes what comes.
            done = jnp.where(t % turn == P - 1, t // turn - 1, C)
            results = jax.lax.dynamic_update_index_in_dim(
                results, conveyor, jnp.where(done < 0, C, done), axis=0
            )
            upcoming = _nth(x_CbTD, jnp.minimum((t + 1) // turn, C - 1))
            conveyor = jax.lax.select((t + 1) % turn == 0, upcoming, conveyor)
        item = t - stage
        busy = (item >= 0) & (item < turn * C)
        # An idle stage computes zeros. What else is in its way could overflow, and NaN times a
        # gradient of zero is NaN.
        x = jax.lax.select(busy, x, jnp.zeros_like(x))
        item = jnp.clip(item, 0, turn * C - 1)
        round_ = item % turn // P
        made, more = compute(_Item(round_, stage, item // turn * P + item % P, busy), x)
        routed = jax.tree.map(lambda x, new: x.at[round_].add(new), routed, more)
        return ((made, conveyor, results), routed), None

    empty = jnp.zeros((C + 1 if C > 1 else 0, *x_CbTD.shape[1:]), x_CbTD.dtype)
    first = (jnp.zeros_like(x_CbTD[0]), x_CbTD[0], empty)
    (moving, routed), _ = jax.lax.scan(tick, (first, routed), jnp.arange(pipeline.ticks))
    _, last, results = advance(pipeline.ticks, moving)
    return jnp.concatenate([results[: C - 1], last[None]]), routed


def _group(
    slots: Sequence[Any],
    graphdefs: Sequence[Any],
    turn: jax.Array,
    x_bTD: jax.Array,
    rope: Any,
    attend: Attend,
    routing: Routing | None,
    *,
    remat: Remat,
    scan: bool,
) -> tuple[jax.Array, Routed | None]:
    """One group of layers, of round `turn`; the weights of a slot are [v, ...] each.

    What its routers did has the layers as its first dim.
    """

    def layer(graphdef: Any) -> Callable[..., Any]:
        def run(
            slot: Any, turn: jax.Array, x_bTD: jax.Array, rope: Any, routing: Routing | None
        ) -> tuple[jax.Array, Routed | None]:
            # Taken in here: of what enters a checkpoint a scan keeps a copy for each tick, unless
            # it is the same in all of them.
            state, x_bTD = _of_turn(slot, turn, x_bTD)
            x_bTD, _, routed = nnx.merge(graphdef, state)(x_bTD, rope, None, attend, routing)
            return x_bTD, None if routed is None else routed.sums

        return rematerialised(run, remat, never_kept=WEIGHT)

    each = [None if routing is None else routing.of_layer(j) for j in range(len(slots))]
    of_layers = list(zip(slots, each, strict=True))
    runs = {graphdef: layer(graphdef) for graphdef in graphdefs}
    if not scan:  # traced once, as in the decoder
        runs = {graphdef: jax.jit(run) for graphdef, run in runs.items()}

    def compute(graphdef: Any, x_bTD: jax.Array, of_layer: Any) -> tuple[jax.Array, Routed | None]:
        slot, routing = of_layer
        return runs[graphdef](slot, turn, x_bTD, rope, routing)

    if scan:
        return scanned(compute, graphdefs, of_layers, x_bTD)
    statistics = []
    for graphdef, of_layer in zip(graphdefs, of_layers, strict=True):
        x_bTD, routed = compute(graphdef, x_bTD, of_layer)
        statistics.append(routed)
    return x_bTD, _stacked(statistics)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


# ------------------------------------------------------------------------- weights


def staged(
    layers: Sequence[Block], pipeline: Pipeline, layout: Layout
) -> tuple[list[Any], list[Any]]:
    """The weights of each slot of a group, [P * v, ...] split over the stages, and the graphdefs.

    Slot j holds layer j of each group, first the groups of the first stage. Stored weights are
    split over the stages too, along the embed dim: an all-to-all over the stages moves them.
    """
    size = len(layers) // (pipeline.stages * pipeline.rounds)
    groups = [
        turn * pipeline.stages + stage
        for stage in range(pipeline.stages)
        for turn in range(pipeline.rounds)
    ]
    slots, graphdefs = [], []
    for j in range(size):
        graphdef, _ = nnx.split(layers[j])
        states = [nnx.split(layers[group * size + j])[1] for group in groups]
        slots.append(jax.tree.map(partial(_staged_leaf, layout), *states, is_leaf=_is_variable))
        graphdefs.append(graphdef)
    return slots, graphdefs


def _staged_leaf(layout: Layout, *variables: Any) -> Any:
    dims = variables[0].get_metadata().get("axes", ())  # a random key has none
    values = (variable.get_value() for variable in variables)  # arrays or `Merged` ones
    return variables[0].replace(jax.tree.map(partial(_staged, layout, dims), *values))


def _staged(layout: Layout, dims: tuple[LogicalAxis, ...], *arrays: jax.Array) -> Any:
    axes = layout.axes("layers")
    stacked = jnp.stack(arrays)
    used = layout.of_stage.spec(*dims)
    for embed in ("embed", "expert_embed"):  # a weight has one at most
        if embed not in dims:
            continue
        stored = layout.axes(embed)
        rest = tuple(axis for axis in stored[len(axes) :] if layout.mesh.shape[axis] > 1)
        assert stored[: len(axes)] == axes, (stored, axes)
        split = [name for entry in used if entry for name in np.atleast_1d(entry)]
        move = partial(
            _to_stages, axes=axes, rest=rest, sizes=layout.mesh.shape, dim=1 + dims.index(embed)
        )
        stacked = jax.shard_map(
            move,
            mesh=layout.mesh.abstract_mesh,
            in_specs=PartitionSpec(None, *layout.spec(*dims)),
            out_specs=PartitionSpec(axes, *used),
            # An axis that no spec names would be summed over in the backward pass.
            axis_names={*axes, *split},
            check_vma=False,
        )(stacked)
    stacked = _constrained(stacked, layout, axes, *used)
    if stacked.dtype != jnp.bfloat16:
        return stacked
    # The gradients of the ticks are added up in float32: see `_of_tick`.
    return Weight(stacked.astype(jnp.float32), jax.lax.stop_gradient(stacked))


def _to_stages(
    x: jax.Array, axes: tuple[str, ...], rest: tuple[str, ...], sizes: Any, dim: int
) -> jax.Array:
    """Shards [P * n, ...] of the embed dim `dim` to [n, ...] of each stage, `rest` splits `dim`.

    Stored shard i is on device i of (stages, rest). Each stage needs P neighbouring shards on one
    device of `rest`, so shards first change places.
    """
    P, num_rest = (math.prod(sizes[name] for name in names) for names in (axes, rest))
    if num_rest > 1:
        places = [(i, i % P * num_rest + i // P) for i in range(P * num_rest)]
        x = jax.lax.ppermute(x, (*axes, *rest), places)
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)


def _of_turn(slot: Any, turn: jax.Array, x_bTD: jax.Array) -> tuple[Any, jax.Array]:
    """The weights of a slot in the round `turn`, and `x_bTD`, which they are for."""
    # The barrier ties the weights to the tick. Otherwise XLA gathers all layers of the stage
    # before the first one.
    own = jax.tree.map(lambda weight: _nth(weight, turn), slot)
    leaves, tree = jax.tree.flatten((own, x_bTD))
    own, x_bTD = jax.tree.unflatten(tree, _tied(leaves))
    return jax.tree.map(lambda weight: checkpoint_name(weight, WEIGHT), own), x_bTD


@jax.custom_jvp
def _tied(arrays: list[jax.Array]) -> list[jax.Array]:
    """A barrier between arrays. Those that nothing differentiates, as frozen ones, stay so."""
    return jax.lax.optimization_barrier(arrays)


def _tied_jvp(primals: Any, tangents: Any) -> tuple[list[jax.Array], list[Any]]:
    moves = [not isinstance(tangent, SymbolicZero) for tangent in tangents[0]]
    tied = iter(
        jax.lax.optimization_barrier([t for t, m in zip(*tangents, moves, strict=True) if m])
    )
    moved = [next(tied) if m else t for t, m in zip(*tangents, moves, strict=True)]
    return jax.lax.optimization_barrier(*primals), moved


_tied.defjvp(_tied_jvp, symbolic_zeros=True)


def _of_tick(weight: Any) -> jax.Array:
    """A weight as a tick reads it: ticks add up the gradient of a `Weight` in float32."""
    return _computed(weight.stored, weight.computed) if _is_weight(weight) else weight


@jax.custom_vjp
def _computed(stored: jax.Array, computed: jax.Array) -> jax.Array:
    return computed


# Nothing reads the values of `stored`, so they take no memory.
_computed.defvjp(
    lambda stored, computed: (computed, None),
    lambda _, gradient: (gradient.astype(jnp.float32), None),
)


def _is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


# ------------------------------------------------------------------------- rows


def _by_stage(x: jax.Array, layout: Layout, convoys: int) -> jax.Array:
    """[B, ...] as [P, C, b, ...]: a stage owns its rows, b of them in each convoy."""
    batch, stages = layout.axes("batch"), layout.axes("layers")
    sizes = [layout.mesh.shape[axis] for axis in batch]
    each = x.shape[0] // (layout.num_replicas * convoys)
    x = _constrained(x.reshape(*sizes, convoys, each, *x.shape[1:]), layout, *batch)
    of_stages = [batch.index(axis) for axis in stages]
    others = [i for i in range(len(batch)) if i not in of_stages]
    order = [*of_stages, len(batch), *others, *range(len(batch) + 1, x.ndim)]
    shape = (layout.size("layers"), convoys, -1, *x.shape[len(batch) + 2 :])
    return _constrained(
        x.transpose(order).reshape(shape), layout, stages, None, layout.of_stage.axes("batch")
    )


def _by_row(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `_by_stage`."""
    batch, stages = layout.axes("batch"), layout.axes("layers")
    names = (*stages, "convoy", *(axis for axis in batch if axis not in stages), "row")
    sizes = [x.shape[1] if name == "convoy" else layout.mesh.shape.get(name, -1) for name in names]
    x = x.reshape(*sizes, *x.shape[3:])
    order = [names.index(name) for name in (*batch, "convoy", "row")]
    x = x.transpose(*order, *range(len(names), x.ndim))
    return _constrained(x.reshape(-1, *x.shape[len(names) :]), layout, batch)


def _constrained(x: jax.Array, layout: Layout, *dims: Any) -> jax.Array:
    """`x` with its first dims on these mesh axes, the others as the compiler likes."""
    spec = PartitionSpec(*dims, *[ANY] * (x.ndim - len(dims)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def _nth(stacked: jax.Array, index: jax.Array) -> jax.Array:
    if stacked.shape[0] == 1:
        return stacked[0]
    return jax.lax.dynamic_index_in_dim(stacked, index, axis=0, keepdims=False)
