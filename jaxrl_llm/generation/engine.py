"""Generation as one program: continuous batching inside `lax.while_loop`, without the host.

A fixed number of slots decodes in parallel. A slot that becomes free takes the next sample of the
queue in the same step. Two loops are nested:

    while samples are left:                  one prefill: the next prompts go into the cache
        while no prefill is due:             one decode step in every slot, then refill free slots
    for each tail:                           the live slots are moved together
        while more are live than the next tail holds:  one decode step

A caller may also have the loop of all slots and the loop of each tail as separate programs
(`GenerationLoops`), which compile in parallel. They compute the same.

queue.py holds the prompts, slots.py the carried state, prefill.py and decode.py the two bodies.
tail.py has the end of a batch, pages.py the memory of the slots. The number of slots is bound by
the tokens of live samples, not by the longest possible response.

Shape letters: N samples, P prompt tokens, R response tokens.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed.communication import DECODE_STEPS, PREFILLS, TAIL_STEPS
from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.distributed.reshard import to_layout
from jaxrl_llm.distributed.sharding import ShardingRules, shardings
from jaxrl_llm.generation.decode import decode
from jaxrl_llm.generation.drafts import Drafting, draft_loop
from jaxrl_llm.generation.in_graph import TurnRecord, begin_turns, record_of
from jaxrl_llm.generation.kv_cache import Cache, HeadAxes, in_place_of, page_entries
from jaxrl_llm.generation.pages import page_sizes
from jaxrl_llm.generation.prefill import prefill
from jaxrl_llm.generation.queue import Queue, make_queue
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings, Quantization
from jaxrl_llm.generation.sizes import (
    MOST_DRAFT_SLOTS,
    EngineSizes,
    engine_sizes,
    most_drafts,
    prefill_implementation,
)
from jaxrl_llm.generation.slots import State, empty_state, fill_slots
from jaxrl_llm.generation.tail import compact
from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.hopper import on_gpu
from jaxrl_llm.kernels.strict import Strict, strict_scope
from jaxrl_llm.models.base import ModelSpec, bind, merge_projections, quantize_projections
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.media import Images

# From this many slots on, matmuls go to cuBLAS instead of XLA's Triton kernels. On an H200 a 1.5B
# rollout then takes 6 % less time with 256 slots and 2 % less with 128, and compiles faster. With
# 64 slots it takes 2 % more; with one slot cuBLAS converts the whole head to float32.
FEWEST_WITHOUT_TRITON = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Responses in the order of the prompts, and counters of the loops.

    The counters are int32 scalars from `generate` and [replicas] from `generate_on_mesh`.
    """

    tokens: jax.Array  # int32 [N, R]; the pad id after the end
    lengths: jax.Array  # int32 [N]; the stop token included
    mask: jax.Array  # float32 [N, R]; 1 for every sampled token of the response
    logprobs: jax.Array  # float32 [N, R]; at the sampling temperature, 0 after the end
    finished: jax.Array  # bool [N]; False when cut at the limit, and for padding rows
    steps: jax.Array  # decode steps
    prefills: jax.Array
    slot_steps: jax.Array  # slots computed, summed over all steps
    live_slot_steps: jax.Array  # slots that decoded a sample, summed likewise
    stalled_slot_steps: jax.Array  # slots in which a sample waited for a page, summed likewise
    # The experts of each token of prompt and response, int8 or int16 [N, P + R, L, K]. They are -1
    # for padding and for tokens that no step read. None unless `record_routes`.
    routes: jax.Array | None = None
    # The ids of the tokens that filters kept, int32 [N, R, K]; -1 for no token. None unless
    # `record_kept` and a filter is on.
    kept: jax.Array | None = None
    turns: TurnRecord | None = None  # turns with an environment in the program
    # Draft tokens that were checked, and those that were taken. None where no tail has drafts.
    drafts_offered: jax.Array | None = None
    drafts_accepted: jax.Array | None = None


class Samples(NamedTuple):
    """Samples to generate, as `generate` takes them."""

    prompts: jax.Array
    lengths: jax.Array
    sample_ids: jax.Array
    seed_key: jax.Array
    limits: jax.Array
    numbers: jax.Array | None = None  # numbers of the rows for `settings.turns`, [N, K]
    images: Images | None = None


def compiler_options(samples: int, num_slots: int) -> dict[str, int]:
    """XLA options for a program that only generates; `samples` is the number on one replica.

    Without them XLA concatenates the weights of matmuls with one input, such as gate and up, in
    every decode step. `merge_projections` does it once, unless that would copy a frozen base.
    """
    slots = min(num_slots or samples, samples)
    if not on_gpu() or slots < FEWEST_WITHOUT_TRITON:
        return {}
    return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}


def generate(
    spec: ModelSpec,
    params: Any,
    prompts_NP: jax.Array,
    prompt_lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    seed_key: jax.Array,
    settings: GenerationSettings,
    *,
    limits_N: jax.Array | None = None,
    heads: HeadAxes | None = None,
    numbers_NK: jax.Array | None = None,
    images: Images | None = None,
) -> GenerationOutput:
    """Answer every prompt, on one device or on one replica of a mesh. Pure; call it inside jit.

    `limits_N` (int32 tokens) ends single responses before `sampling.max_new_tokens`. `heads` are
    the mesh axes that split attention heads, where the caller left some automatic
    (`generate_on_mesh` does). `numbers_NK` are numbers of the rows, for the environment of
    `settings.turns`.

    Requires: prompts are padded on the right; a row of length 0 is padding and gets no response.
        The rows of a group hold the same prompt, or all of them are padding. Each limit is at
        least 1. `params` have the dtype to compute in.
    Guarantees: a sample's tokens depend only on its prompt, its entry of `sample_ids_N` and
        `seed_key`, which is fold_in(key(seed), step).
    """
    engine = _engine(
        spec,
        params,
        prompts_NP,
        prompt_lengths_N,
        sample_ids_N,
        seed_key,
        settings,
        limits_N=limits_N,
        heads=heads,
        numbers_NK=numbers_NK,
        images=images,
    )
    state = engine.empty()
    if prompts_NP.shape[0] > 0:
        with strict_scope(engine.strict):
            state = _run_loops(engine, state)
    queue = engine.queue
    return _output(state, settings.sampling, settings.pad_id, queue.lengths_N, queue.group_N)


class GenerationModel(NamedTuple):
    """A model with the weights that the decode step reads, such as merged projections."""

    spec: ModelSpec
    params: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AddedWeights:
    """Weights that the generation form adds to the model, such as merged projections.

    A program returns these alone, because it would copy every weight that it returns.
    """

    spec: ModelSpec = field(metadata={"static": True})
    params: Any  # None for a weight of the trained model

    def model(self, trained: Any) -> GenerationModel:
        """The model in generation form; `trained` are the weights of the role."""

        def one(path: Any, added: jax.Array | None) -> jax.Array:
            if added is not None:
                return added
            return functools.reduce(lambda tree, key: tree[key.key], path, trained)

        params = jax.tree.map_with_path(one, self.params, is_leaf=lambda x: x is None)
        return GenerationModel(self.spec, params)


def _added_weights(model: GenerationModel, trained: Any) -> AddedWeights:
    """The weights of `model` that are not among the `trained` ones."""
    known = {id(x) for x in jax.tree.leaves(trained)}
    params = jax.tree.map(lambda x: None if id(x) in known else x, model.params)
    return AddedWeights(model.spec, params)


@dataclass(frozen=True, kw_only=True)
class GenerationLoops:
    """`generate` with these arguments, cut between its loops: the `Pieces` of a chain.

    Make it inside jit, with the same arguments for each piece. The cache may be donated from one
    to the next. `model` makes spec and weights to compute with of the `trained` weights.

    Guarantees: the tokens and log-probs of `generate`.
    """

    model: Callable[[Any], tuple[ModelSpec, Any]]
    trained: Any
    prompts_NP: jax.Array
    lengths_N: jax.Array
    sample_ids_N: jax.Array
    seed_key: jax.Array
    settings: GenerationSettings
    limits_N: jax.Array | None = None
    images: Images | None = None
    output: Callable[[GenerationOutput], Any] = lambda output: output  # what `end` returns of it

    def begin(self) -> tuple[AddedWeights, State, Cache]:
        """Run the loops of all slots. The returned state is without its cache."""
        engine = self._engine(*self.model(self.trained))
        with strict_scope(engine.strict):
            after = _run_main_loops(engine, engine.empty())
        return _added_weights(engine.model, self.trained), *_cut(after)

    def go_on(
        self, number: int, kept: AddedWeights, passed: State, moved: Cache
    ) -> tuple[State, Cache]:
        """Run tail `number`, counted from 0."""
        model = kept.model(self.trained)
        engine = self._engine(model.spec, model.params, in_generation_form=True)
        with strict_scope(engine.strict):
            return _cut(_run_tail(engine, passed._replace(cache=moved), number))

    def end(self, passed: State) -> Any:
        """The responses, as `output` has them."""
        settings = self.settings
        group_N = jnp.arange(self.lengths_N.shape[0]) // settings.group
        return self.output(
            _output(passed, settings.sampling, settings.pad_id, self.lengths_N, group_N)
        )

    def _engine(
        self, spec: ModelSpec, params: Any, *, in_generation_form: bool = False
    ) -> "_Engine":
        return _engine(
            spec,
            params,
            self.prompts_NP,
            self.lengths_N,
            self.sample_ids_N,
            self.seed_key,
            self.settings,
            limits_N=self.limits_N,
            images=self.images,
            in_generation_form=in_generation_form,
        )


def _cut(state: State) -> tuple[State, Cache]:
    """A state without its cache, and the cache."""
    return state._replace(cache=()), state.cache


class _Engine(NamedTuple):
    """The bodies of the loops for one queue of prompts."""

    empty: Callable[[], State]
    prefill: Callable[[State], State]
    decode: Callable[[State], State]
    decode_tail: Callable[..., State]
    drafting: Drafting | None  # None: no tail has drafts
    fill_slots: Callable[[State], State]
    queue: Queue
    sizes: EngineSizes
    strict: Strict | None
    model: GenerationModel


def _engine(
    spec: ModelSpec,
    params: Any,
    prompts_NP: jax.Array,
    prompt_lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    seed_key: jax.Array,
    settings: GenerationSettings,
    *,
    limits_N: jax.Array | None = None,
    heads: HeadAxes | None = None,
    images: Images | None = None,
    in_generation_form: bool = False,
    numbers_NK: jax.Array | None = None,
) -> _Engine:
    """The engine of `generate` for its arguments.

    `in_generation_form` says that `params` are the weights of a `GenerationModel`.
    """
    prompts_NP, prompt_lengths_N, sample_ids_N = (
        jnp.asarray(x) for x in (prompts_NP, prompt_lengths_N, sample_ids_N)
    )
    num_samples, max_new_tokens = prompts_NP.shape[0], settings.sampling.max_new_tokens
    dtype = bind(spec, params).dtype
    sizes = engine_sizes(
        settings,
        prompts_NP,
        prefill_implementation(settings.attention, dtype, spec.config),
    )
    align = 1 if settings.strict is None else settings.strict.align
    cache_dtype = dtype if settings.quantization == "none" else FLOAT8
    pages = page_sizes(
        num_slots=sizes.num_slots,
        own_length=max_new_tokens,
        page_entries=settings.tokens_a_page
        or page_entries(spec.config, cache_dtype, max_new_tokens),
        cache_tokens=settings.cache_tokens,
    )
    if limits_N is None:
        limits_N = jnp.full((num_samples,), max_new_tokens, jnp.int32)
    queue = make_queue(
        prompts_NP,
        prompt_lengths_N,
        sample_ids_N,
        limits_N,
        max_new_tokens=max_new_tokens,
        group=sizes.group,
        prefill=sizes.prefill,
        align=align,
        strings=settings.sampling.stop_strings,
        images=images,
    )
    # The strict matmul gives an output the same bits in any kernel; XLA's chunks do not.
    in_chunks = settings.strict is not None and not settings.strict.kernels
    split = heads is not None or in_chunks
    if not in_generation_form:
        # A role's weights were cast: its spec has the dtype in which they are stored.
        spec, params = generation_form(
            spec.of_dtype(dtype), params, settings.quantization, split=split
        )
    how = {"attention": settings.attention, "heads": heads}
    sampling = settings.sampling
    num_kept = sampling.num_kept(spec.config.vocab_size)
    step = partial(decode, spec, params, queue.rows, sizes.group, pages, seed_key, sampling, **how)
    step = partial(step, ready=queue.ready)
    turns = None
    if settings.turns is not None:
        assert numbers_NK is not None
        step = partial(step, in_graph=settings.turns)
        turns = begin_turns(settings.turns, jnp.asarray(numbers_NK), max_new_tokens)
    most = most_drafts(settings, spec.config, sizes)
    return _Engine(
        empty=partial(
            empty_state,
            spec.config,
            queue,
            pages,
            num_slots=sizes.num_slots,
            prompt_rows=sizes.prompt_rows,
            cache_dtype=cache_dtype,
            state_dtype=dtype,
            max_new_tokens=max_new_tokens,
            record_routes=settings.record_routes,
            record_kept=num_kept if settings.record_kept else 0,
            turns=turns,
            drafts=most > 0,
        ),
        prefill=partial(prefill, spec, params, queue, sizes, **how),
        decode=step,
        decode_tail=partial(step, in_tail=True),
        drafting=Drafting.of(most, queue) if most else None,
        fill_slots=partial(fill_slots, queue, pages),
        queue=queue,
        sizes=sizes,
        strict=settings.strict,
        model=GenerationModel(spec, params),
    )


def generate_on_mesh(
    spec: ModelSpec,
    params: Any,
    prompts_NP: jax.Array,
    prompt_lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    seed_key: jax.Array,
    settings: GenerationSettings,
    *,
    layout: Layout,
    stored: Layout | None = None,
    limits_N: jax.Array | None = None,
    numbers_NK: jax.Array | None = None,
    images: Images | None = None,
) -> GenerationOutput:
    """`generate` on every replica of a layout, each with its share of the prompts.

    The program contains the layout switch: `params` come in the layout `stored` (None: in `layout`)
    and are made whole over the replicas and split by heads. Each replica has its own slots and
    cache and runs its own number of steps. The loops contain no collectives except those over the
    axes of the heads. If two replicas share a group, both compute its prompt. Call it inside
    jit.

    Requires: the replicas divide the number of prompts.
    """
    replicas, num_samples = layout.num_replicas, prompts_NP.shape[0]
    heads, experts = split_of(spec.config, layout)
    before, after = (
        shardings(spec.axes, spec.params, layout.mesh, each.rules)
        for each in (stored or layout, layout)
    )
    params = to_layout(params, before, after)
    if limits_N is None:
        limits_N = jnp.full((num_samples,), settings.sampling.max_new_tokens, jnp.int32)
    settings = replace(settings, group=math.gcd(settings.group, num_samples // replicas))

    def one_replica(params: Any, samples: Samples) -> GenerationOutput:
        with experts.for_layers() if experts else nullcontext():
            output = generate(
                spec,
                params,
                samples.prompts,
                samples.lengths,
                samples.sample_ids,
                samples.seed_key,
                settings,
                limits_N=samples.limits,
                heads=heads,
                numbers_NK=samples.numbers,
                images=samples.images,
            )
        return jax.tree.map(lambda x: x[None] if x.ndim == 0 else x, output)

    rows, whole = PartitionSpec(layout.axes("batch")), PartitionSpec()
    samples = Samples(
        *(prompts_NP, prompt_lengths_N, sample_ids_N, seed_key, limits_N),
        numbers=numbers_NK,
        images=images,
    )
    each: Any = rows
    specs = jax.tree.map(lambda _: each, samples)._replace(seed_key=whole)
    # Axes of heads stay automatic: the partitioner splits the matmuls as the parameters are split.
    # With whole heads there is nothing to split, so all axes are manual.
    manual = layout.mesh.axis_names if heads is None else layout.axes("batch")
    return jax.shard_map(
        one_replica,
        mesh=layout.mesh,
        in_specs=(whole, specs),
        out_specs=rows,
        axis_names=set(manual),
        check_vma=False,  # trip counts differ by replica, so the carries' types would not agree
    )(params, samples)


def split_of(config: ModelConfig, layout: Layout | None) -> tuple[HeadAxes | None, Layout | None]:
    """The axes that split heads, and the layout of experts; None where a device has all of them.

    Every device has the one head of a cache of latent attention. The partitioner cannot split a
    grouped matmul: layers of experts split it themselves.
    """
    if layout is None or layout.size("mlp") == 1:
        return None, None
    group = layout.axes("mlp")
    experts = Layout(layout.mesh, ShardingRules(mlp=group)) if config.mixture is not None else None
    return HeadAxes(group, layout.axes("kv_heads") if config.latent is None else ()), experts


def generation_form(
    spec: ModelSpec, params: Any, quantization: Quantization, *, split: bool
) -> tuple[ModelSpec, Any]:
    """The model with merged projections, and with float8 ones if asked for.

    `quantize_projections` says what is in float8.

    One with adapters keeps its projections: to merge them would copy the base. One that came with
    merged projections is read as it is.
    """
    if not split and spec.lora is None and spec.form == "separate":
        spec, params = merge_projections(spec, params)
    if quantization == "float8":
        spec, params = quantize_projections(spec, params)
    return spec, params


def _run_loops(engine: _Engine, state: State) -> State:
    """The two nested loops, then one loop for each tail."""
    state = _run_main_loops(engine, state)
    for number in range(len(engine.sizes.tails)):
        state = _run_tail(engine, state, number)
    return state


def _run_main_loops(engine: _Engine, state: State) -> State:
    """Prefills, and decode steps in all slots until the first tail can hold the live ones."""
    prefill, decode, fill_slots, queue = (
        engine.prefill,
        engine.decode,
        engine.fill_slots,
        engine.queue,
    )
    num_pending = queue.ready(queue.num_groups)
    fewest = (*engine.sizes.tails, 0)[0]

    def prefill_due(state: State) -> jax.Array:
        taken = state.head >= queue.ready(state.prefilled)
        return (state.prefilled < queue.num_groups) & taken & ~jnp.all(state.slots.live_B)

    def unfinished(state: State) -> jax.Array:
        return (state.head < num_pending) | _more_live(fewest, state)

    def prefill_then_decode(state: State) -> State:
        state = fill_slots(prefill(state))
        with jax.named_scope(DECODE_STEPS):
            return lax.while_loop(
                lambda state: unfinished(state) & ~prefill_due(state),
                lambda state: fill_slots(decode(state)),
                state,
            )

    with jax.named_scope(PREFILLS):
        return lax.while_loop(unfinished, prefill_then_decode, state)


def _run_tail(engine: _Engine, state: State, number: int) -> State:
    """Decode steps in the slots of a tail, until the next tail can hold the live ones."""
    num_slots, fewer = (*engine.sizes.tails, 0)[number : number + 2]
    few = compact(state, num_slots)

    def go_on(state: State, drafts_pay: jax.Array) -> jax.Array:
        # Where drafts are accepted, we assume that free slots save more than a smaller step does.
        return _more_live(jnp.where(drafts_pay, fewer // 2, fewer), state)

    with jax.named_scope(TAIL_STEPS):
        if engine.drafting is None or num_slots > MOST_DRAFT_SLOTS:
            few = lax.while_loop(partial(_more_live, fewer), engine.decode_tail, few)
        else:
            drafted = partial(engine.decode_tail, drafting=engine.drafting)
            few = draft_loop(go_on, drafted, engine.decode_tail, few)
    return few._replace(cache=in_place_of(state.cache, few.cache))


def _more_live(number: int | jax.Array, state: State) -> jax.Array:
    return state.slots.num_live > number


def _output(
    state: State,
    sampling: SamplingParams,
    pad_id: int,
    prompt_lengths_N: jax.Array,
    group_N: jax.Array,
) -> GenerationOutput:
    written_NR = state.tokens_NR >= 0
    mask_NR = written_NR if state.turns is None else state.turns.turn_ids_NR >= 0
    lengths_N = jnp.sum(written_NR, axis=1, dtype=jnp.int32)
    last_N1 = jnp.maximum(lengths_N - 1, 0)[:, None]
    last_N = jnp.take_along_axis(state.tokens_NR, last_N1, axis=1)[:, 0]
    finished_N = (lengths_N > 0) & sampling.is_stop(last_N)
    if sampling.stop_strings is not None:
        finished_N |= state.stop_states_N == sampling.stop_strings.complete
    return GenerationOutput(
        tokens=jnp.where(written_NR, state.tokens_NR, pad_id),
        lengths=lengths_N,
        mask=mask_NR.astype(jnp.float32),
        logprobs=state.logprobs_NR,
        finished=finished_N,
        steps=state.steps,
        prefills=state.prefills,
        slot_steps=state.slot_steps,
        live_slot_steps=state.live_slot_steps,
        stalled_slot_steps=state.stalled_slot_steps,
        routes=state.routes and state.routes.of_samples(prompt_lengths_N, group_N),
        kept=state.kept_NRK,
        turns=None if state.turns is None else record_of(state.turns),
        drafts_offered=state.drafts and state.drafts.offered,
        drafts_accepted=state.drafts and state.drafts.accepted,
    )
