"""Generation with random weights: fixed batches, the RL mix, own lengths, and prefill alone."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import MAIN, Case, CheckFailed, most_mult_prob_error, require
from benchmarks.options import Options
from benchmarks.roofline import (
    H200,
    Limits,
    decode_seconds,
    limits_of,
    prefill_flops,
    prefill_seconds,
)
from benchmarks.workloads import GenerationWorkload, generation_workloads
from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.device_memory import free_memory
from jaxrl_llm.distributed.layout import Layout, generation_layout, mesh_of
from jaxrl_llm.distributed.sharding import batch_sharding, replicated, shardings
from jaxrl_llm.estimate.memory import float8_bytes
from jaxrl_llm.generation.engine import (
    GenerationLoops,
    GenerationOutput,
    compiler_options,
    generate_on_mesh,
)
from jaxrl_llm.generation.memory import GB, Replica, fitted
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.sizes import slots_of, tails_of
from jaxrl_llm.learner.forward import ForwardSettings, row_logprobs
from jaxrl_llm.models.base import ModelSpec, init_sharded, model_spec
from jaxrl_llm.program.ahead import Compilers
from jaxrl_llm.program.chain import Chain


class Weights:
    """Random weights of one shape in the generation layout, shared by its cases."""

    def __init__(self, spec: ModelSpec, config: Config, layout: Layout, users: int) -> None:
        self._config, self._mesh = config, layout.mesh
        self._trainers: dict[tuple[int, int], jax.stages.Lowered] = {}
        self.shardings = shardings(spec.axes, spec.params, layout.mesh, layout.rules)
        self.abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            spec.params,
            self.shardings,
        )
        self.spec, self._users, self._params = spec, users, None

    @property
    def bytes(self) -> int:
        """Bytes of the parameters on a device."""
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(self.abstract)
        )

    def get(self) -> Any:
        """The parameters, made on first use."""
        if self._params is None:
            self._params = init_sharded(self.spec, jax.random.key(0), self.shardings)
        return self._params

    def trainer(self, rows: int, length: int) -> jax.stages.Lowered:
        """The trainer's log-probs of `rows` whole rows; one object for equal sizes."""
        sizes = rows, length
        if sizes not in self._trainers:
            actor = self._config.actor
            settings = ForwardSettings(dtype=actor.dtype, attention=actor.attention)
            fn = partial(row_logprobs, spec=self.spec, settings=settings)
            tokens = jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=replicated(self._mesh))
            self._trainers[sizes] = jax.jit(fn).lower(self.abstract, tokens)
        return self._trainers[sizes]

    def done(self) -> None:
        """Count one user less; the last one drops the arrays."""
        self._users -= 1
        if self._users == 0:
            self._params = None


class Generation(Case):
    """One workload answered whole: prompts in, tokens and log-probs out."""

    benchmark = "generation"
    warm = True  # the check is a whole run
    num_checked = 4  # rows

    def __init__(
        self,
        shape: str,
        work: GenerationWorkload,
        config: Config,
        layout: Layout,
        weights: Weights,
        drafts: int = 0,
    ) -> None:
        self.shape, self.name = shape, f"{work.name}_drafts_{drafts}" if drafts else work.name
        self.drafts = drafts
        self.offered: jax.Array | None = None
        self.accepted: jax.Array | None = None
        self.work, self.config, self.weights = work, config, weights
        self.layout, self.mesh = layout, layout.mesh
        self.spec = weights.spec
        # Spread over all rows, with the last and the longest: refilled slots and every replica.
        spread = np.linspace(0, work.rows - 1, self.num_checked).astype(int)
        spread[1] = np.argmax(work.limits)
        self.checked = np.unique(spread)
        self.settings = self._settings()

    def lower(self) -> dict[str, jax.stages.Lowered]:
        return dict(self.lower_in_turn())

    def lower_in_turn(self) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """The programs of a run: on one device, each loop of the engine is one."""
        work = self.work
        by_row = batch_sharding(self.mesh)
        whole = replicated(self.mesh)
        abstract = partial(jax.ShapeDtypeStruct, sharding=by_row)
        inputs = (
            abstract((work.rows, work.prompt_length), jnp.int32),
            abstract((work.rows,), jnp.int32),
            abstract((work.rows,), jnp.uint32),
            abstract((work.rows,), jnp.int32),
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
        rows = work.rows // self.layout.num_replicas
        options = compiler_options(rows, self.settings.num_slots)
        arguments = self.weights.abstract, *inputs, key
        tails = len(tails_of(self.settings, rows))
        if tails and self.mesh.size == 1:
            chain = Chain(
                self._answer,
                self._pieces,
                tails,
                num_arguments=len(arguments),
                place=whole,
                out_shardings=whole,
                compiler_options=options,
                compilers=Compilers(),
            )
            for number, (program, given) in enumerate(chain.links(*arguments)):
                yield f"{MAIN} {number}", program.lower(*given)
        else:
            answer = jax.jit(self._answer, out_shardings=by_row, compiler_options=options)
            yield MAIN, answer.lower(*arguments)
        rows = len(self.checked)
        yield "trainer", self.weights.trainer(rows, work.prompt_length + max(work.limits))

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        work = self.work
        rng = np.random.default_rng(1)
        prompts = rng.integers(0, self.spec.config.vocab_size, (work.prompts, work.prompt_length))
        arrays = (
            prompts.astype(np.int32).repeat(work.samples, axis=0),
            np.asarray(work.prompt_lengths, np.int32).repeat(work.samples),
            np.arange(work.rows, dtype=np.uint32),
            np.asarray(work.limits, np.int32),
        )
        self.inputs = jax.device_put(arrays, batch_sharding(self.mesh))
        self.keys = [
            jax.device_put(jax.random.key(seed), replicated(self.mesh)) for seed in range(16)
        ]
        self.programs, self.params, self.calls = programs, self.weights.get(), 0

    def check(self) -> dict[str, float]:
        """Require each response's length, and log-probs that agree with the trainer's."""
        out = self.run()
        counts = np.asarray(out.lengths)
        if not np.array_equal(counts, self.work.limits):
            raise CheckFailed("responses do not have the lengths that were asked for")
        rows = self.checked
        # Where each response is in its row: right after its prompt.
        response = np.asarray(self.inputs[1])[rows, None] + np.arange(out.tokens.shape[1])
        tokens = np.pad(np.asarray(self.inputs[0])[rows], ((0, 0), (0, out.tokens.shape[1])))
        np.put_along_axis(tokens, response, np.asarray(out.tokens[rows]), axis=1)
        tokens = jax.device_put(tokens, replicated(self.mesh))
        trainer = self.programs["trainer"](self.params, tokens)
        trainer = jnp.take_along_axis(trainer, jnp.asarray(response), axis=1)
        sampled = out.logprobs[rows], out.mask[rows]
        error = float(mismatch_metrics(trainer, *sampled)["token_mult_prob_error"])
        most = most_mult_prob_error(self.spec.config, self.config.rollout.quantization)
        require("token_mult_prob_error", error, most)
        return {"token_mult_prob_error": error}

    def run(self) -> GenerationOutput:
        # Another seed each time, so that no run repeats an earlier one.
        key = self.keys[self.calls % len(self.keys)]
        self.calls += 1
        first, *others = (run for name, run in self.programs.items() if name.startswith(MAIN))
        arguments = self.params, *self.inputs, key
        output: GenerationOutput
        if others:
            kept, passed, moved = first(*arguments)
            for tail in others[:-1]:
                passed, moved = tail(*arguments, kept, passed, moved)
            del kept, moved
            output = others[-1](*arguments, passed)
        else:
            output = first(*arguments)
        self.steps, self.prefills = output.steps, output.prefills
        self.offered, self.accepted = output.drafts_offered, output.drafts_accepted
        return output

    def figures(self, seconds: float) -> dict[str, float]:
        tokens, devices = sum(self.work.limits), self.mesh.size
        steps = int(np.max(np.asarray(self.steps)))
        figures = {
            "tokens/s": tokens / seconds,
            "tokens/s/device": tokens / seconds / devices,
            "ms a decode step": 1e3 * seconds / max(steps, 1),
            "decode steps": steps,
            "prefills": int(np.max(np.asarray(self.prefills))),
            "slots": slots_of(self.settings, self.work.rows // self.layout.num_replicas),
            "cache tokens": self.settings.cache_tokens,
        }
        if self.offered is not None and self.accepted is not None:
            figures["draft tokens"] = int(np.sum(np.asarray(self.offered)))
            figures["accepted"] = int(np.sum(np.asarray(self.accepted)))
        limits = limits_of(jax.devices()[0].device_kind)
        return figures if limits is None else figures | self._of_roofline(seconds, limits)

    def _of_roofline(self, seconds: float, limits: Limits) -> dict[str, float]:
        """The roofline of the card, and the share of it that was reached."""
        work, config, devices = self.work, self.spec.config, self.mesh.size
        float8 = self.config.rollout.quantization == "float8"
        # Reading the cache takes time in proportion to its tokens, so a mean over them is exact.
        prompts = np.repeat(work.prompt_lengths, work.samples)
        prompt = float(np.average(prompts, weights=work.limits))
        decode = decode_seconds(config, prompt, work.limits, float8=float8, limits=limits)
        prefill = prefill_seconds(config, work.prompt_lengths, float8=float8, limits=limits)
        return {
            "roofline tokens/s": sum(work.limits) / decode * devices,
            "fraction of roofline": decode / devices / seconds,
            "fraction with prefill": (decode + prefill) / devices / seconds,
        }

    def release(self) -> None:
        weights = self.weights
        super().release()
        weights.done()

    def _answer(
        self, params: Any, prompts: Any, lengths: Any, sample_ids: Any, limits: Any, key: Any
    ) -> GenerationOutput:
        return generate_on_mesh(
            self.spec,
            params,
            prompts,
            lengths,
            sample_ids,
            key,
            self.settings,
            layout=self.layout,
            limits_N=limits,
        )

    def _pieces(
        self, params: Any, prompts: Any, lengths: Any, sample_ids: Any, limits: Any, key: Any
    ) -> GenerationLoops:
        return GenerationLoops(
            model=lambda trained: (self.spec, trained),
            trained=params,
            prompts_NP=prompts,
            lengths_N=lengths,
            sample_ids_N=sample_ids,
            seed_key=key,
            settings=self.settings,
            limits_N=limits,
        )

    def _settings(self) -> GenerationSettings:
        """The settings, with the slots and cache tokens that fit next to the weights."""
        work, rollout, model = self.work, self.config.rollout, self.spec.config
        settings = GenerationSettings(
            sampling=SamplingParams(
                max_new_tokens=max(work.limits),
                temperature=rollout.temperature,
            ),
            group=work.samples,
            num_slots=rollout.num_slots,
            cache_tokens=rollout.cache_tokens,
            drafts=self.drafts,
            quantization=rollout.quantization,
            attention=self.config.actor.attention,
        )
        tensor = self.layout.size("mlp")
        held = self.weights.bytes
        if rollout.quantization == "float8":
            held += float8_bytes(model) / tensor
        replica = Replica(
            config=model,
            dtype=self.spec.dtype,
            tensor=tensor,
            samples=work.rows // self.layout.num_replicas,
            width=work.prompt_length,
        )
        return fitted(settings, replica, rollout.memory_gb * GB or free_memory(held))


class Prefill(Generation):
    """Prompts with a single token sampled after each."""

    num_checked = 64  # prompts of one token each

    def figures(self, seconds: float) -> dict[str, float]:
        work, devices = self.work, self.mesh.size
        flops = prefill_flops(self.spec.config, work.prompt_lengths) / seconds / devices
        return {
            "prompt tokens/s": sum(work.prompt_lengths) / seconds,
            "prompt tokens/s/device": sum(work.prompt_lengths) / seconds / devices,
            "mean prompt tokens": sum(work.prompt_lengths) / work.prompts,
            "prefills": int(np.max(np.asarray(self.prefills))),
            "TFLOP/s": flops / 1e12,
            "fraction of 790 TFLOP/s": flops / H200.peak,
        }


def generation_cases(options: Options) -> Sequence[Case]:
    """Every workload of every shape."""
    cases: list[Case] = []
    for shape in options.shapes:
        config = options.config(shape)
        heads = options.shapes[shape].num_kv_heads
        mesh = mesh_of(config.mesh, [heads])
        layout = generation_layout(mesh, heads, tensor=config.mesh.generation.tensor)
        work = generation_workloads(options, shape)
        for one in work:
            if one.rows % layout.num_replicas:
                raise ValueError(
                    f"{one.name} has {one.rows} rows, which do not divide over "
                    f"{layout.num_replicas} replicas; choose others with --batch or --groups"
                )
        # Drawn in the form that generation reads: the merged weights of a model that barely fits
        # would not fit a second time. Devices that share heads split each projection.
        spec = model_spec(
            options.shapes[shape],
            dtype=config.rollout.dtype or config.actor.dtype,
            form="separate" if layout.size("mlp") > 1 else "merged",
        )
        # With `rollout.drafts`, each workload is also measured without.
        drafts = sorted({0, config.rollout.drafts})
        runs = [(one, n) for one in work for n in drafts if not (n and one.prefill)]
        weights = Weights(spec, config, layout, len(runs))
        for one, number in runs:
            kind = Prefill if one.prefill else Generation
            cases.append(kind(shape, one, config, layout, weights, number))
    return cases
