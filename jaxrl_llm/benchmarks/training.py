"""Training: the actor's update and the passes without gradient, as the stages run them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.alias import Algorithm
from jaxrl_llm.benchmarks.harness import Case, relative_error, require
from jaxrl_llm.benchmarks.options import Options
from jaxrl_llm.benchmarks.roofline import H200, forward_flops, training_flops
from jaxrl_llm.benchmarks.workloads import TrainingWorkload, training_workloads
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.kernels.flash_attention import attention_reference
from jaxrl_llm.learner.forward import ForwardSettings, response_logprobs
from jaxrl_llm.learner.losses import policy_loss, with_counts
from jaxrl_llm.models.base import ModelSpec, bind, init_params, model_spec
from jaxrl_llm.models.shapes import SHAPES
from jaxrl_llm.trainer import stages
from jaxrl_llm.trainer.dataflow import Stage
from jaxrl_llm.trainer.online import build_algorithm
from jaxrl_llm.trainer.roles import Role, make_role
from jaxrl_llm.types import RolloutBatch

# Of log-probs (nats, root mean square) and of gradients (relative L2) in bf16, at CHECK_LAYERS
# layers of the shape, against float32.
MOST_LOGPROB_ERROR = 0.05
MOST_GRADIENT_ERROR = 0.05
CHECK_LAYERS, CHECK_ROWS, CHECK_PROMPT, CHECK_RESPONSE = 2, 2, 16, 48
CLIP = 0.2


class Training(Case):
    """One pass over one batch: the stage's own function, compiled with a donated state."""

    benchmark = "training"

    def __init__(
        self, shape: str, work: TrainingWorkload, options: Options, mesh: Mesh, checks: "Checks"
    ) -> None:
        self.shape, self.name, self.work, self.mesh = shape, work.name, work, mesh
        self.config, self.checks = options.config(shape), checks
        self.prompt = min(options.prompt or 1, work.tokens - 1)
        self.role = make_case_role(shape, self.config, mesh, work.kind)
        self.stage = _stage(self.role, self.config, work)

    def lower(self) -> dict[str, jax.stages.Lowered]:
        batch = jax.eval_shape(self._batch)
        fields = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(self.mesh))
            for x in (getattr(batch, name) for name in self.stage.reads)
        ]
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self.mesh))
        update = self.work.kind == "update"
        outputs = (self.role.shardings, None) if update else batch_sharding(self.mesh)
        program = jax.jit(self._pass, donate_argnums=(0,) if update else (), out_shardings=outputs)
        return {"main": program.lower(self.role.abstract(), step, *fields)}

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.program = programs["main"]
        # Before the arrays: its own are gone again when it returns.
        self.found = self.checks.run()
        batch = jax.jit(self._batch, out_shardings=batch_sharding(self.mesh))()
        self.fields = [getattr(batch, name) for name in self.stage.reads]
        del batch
        self.step = jax.device_put(jnp.int32(1), replicated(self.mesh))
        params = jax.jit(
            partial(init_params, self.role.spec), out_shardings=self.role.param_shardings
        )(jax.random.key(0))
        # The parameters become the state's: at 7B a copy would not fit.
        init = jax.jit(_state_of(self.role), out_shardings=self.role.shardings, donate_argnums=(0,))
        self.state = init(params)

    def check(self) -> dict[str, float]:
        """The reduced model's errors; then that the real one gives finite numbers."""
        out = self.run()
        values = out["actor/grad_norm"] if self.work.kind == "update" else out
        finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(values))
        require("number of outputs that are not finite", 0.0 if finite else 1.0, 0.0)
        return self.found

    def run(self) -> Any:
        if self.work.kind == "update":
            self.state, metrics = self.program(self.state, self.step, *self.fields)
            return metrics
        return self.program(self.state, self.step, *self.fields)

    def figures(self, seconds: float) -> dict[str, float]:
        work, devices = self.work, self.mesh.size
        count = training_flops if work.kind == "update" else forward_flops
        flops = count(SHAPES[self.shape], work.rows, work.tokens) / seconds / devices
        return {
            "tokens/s": work.rows * work.tokens / seconds,
            "TFLOP/s": flops / 1e12,
            "fraction of 790 TFLOP/s": flops / H200.peak,
        }

    def _pass(self, state: Any, step: jax.Array, *fields: jax.Array) -> Any:
        out = self.stage.fn(state, step, *fields)
        return (out.state, out.metrics) if self.work.kind == "update" else out.writes

    def _batch(self) -> RolloutBatch:
        work = self.work
        vocab = SHAPES[self.shape].vocab_size
        return random_batch(work.rows, self.prompt, work.tokens - self.prompt, vocab)


def random_batch(rows: int, prompt: int, response: int, vocab_size: int) -> RolloutBatch:
    """Full rows of random tokens with every field that an update may read; pure."""
    keys = iter(jax.random.split(jax.random.key(1), 16))

    def tokens(length: int) -> jax.Array:
        return jax.random.randint(next(keys), (rows, length), 0, vocab_size, jnp.int32)

    def normal(scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), (rows, response))

    old = -jnp.log(float(vocab_size)) + normal(0.1)
    return RolloutBatch(
        prompts=tokens(prompt),
        prompt_lengths=jnp.full((rows,), prompt, jnp.int32),
        sample_ids=jnp.arange(rows, dtype=jnp.uint32),
        responses=tokens(response),
        mask=jnp.ones((rows, response), jnp.float32),
        rollout_logprobs=old + normal(0.01),
        old_logprobs=old,
        reference_logprobs=old + normal(0.1),
        values=normal(),
        scores=jax.random.normal(next(keys), (rows,)),
        rewards=normal(),
        advantages=normal(),
        returns=normal(),
        importance_weights=jnp.ones((rows, response), jnp.float32),
    )


def make_case_role(shape: str, config: Config, mesh: Mesh, kind: str) -> Role:
    """The role whose pass is measured: the actor, or the critic for `values`."""
    settings = config.critic if kind == "values" else config.actor
    model = "scalar" if kind == "values" else "causal_lm"
    spec = model_spec(SHAPES[shape], model, settings.param_dtype)
    role = make_role("critic" if kind == "values" else "actor", spec, settings, mesh)
    return role.with_optimizer(settings.optimizer, 1000) if kind == "update" else role


def _stage(role: Role, config: Config, work: TrainingWorkload) -> Stage:
    settings = config.critic if work.kind == "values" else config.actor
    micro_batch = settings.micro_batch_size * config.mesh.num_replicas or work.rows
    if work.rows % micro_batch:
        raise ValueError(
            f"{work.name}: {work.rows} rows are no multiple of the micro-batch of {micro_batch}; "
            "change --config.actor.micro_batch_size or --batch"
        )
    sizes = stages.UpdateSizes(
        num_mini_batches=1,
        num_epochs=1,
        num_micro_batches=work.rows // micro_batch,
        num_forward_micro_batches=work.rows // micro_batch,
    )
    algorithm, temperature = build_algorithm(config.algorithm), config.rollout.temperature
    if work.kind == "values":
        return stages.values_stage(role, sizes)
    if work.kind == "logprob":
        return stages.old_logprob_stage(role, algorithm, sizes, temperature=temperature)
    return stages.update_actor_stage(role, algorithm, sizes, temperature=temperature)


def _state_of(role: Role) -> Callable[[Any], Any]:
    """Parameters to what the role keeps, to be jitted with the parameters donated."""
    return (lambda params: params) if role.optimizer is None else role._init


class Checks:
    """The forward pass and the PPO gradient of the shape, cut to two layers, against float32.

    Run once for all cases of a shape.
    """

    def __init__(self, shape: str, config: Config) -> None:
        self._model = replace(SHAPES[shape], num_layers=CHECK_LAYERS, sliding_window=())
        self._config, self._errors = config, None

    def run(self) -> dict[str, float]:
        """Errors by name; CheckFailed where one is too large."""
        if self._errors is None:
            self._errors = self._compare()
        require("logprob_error", self._errors["logprob_error"], MOST_LOGPROB_ERROR)
        require("gradient_error", self._errors["gradient_error"], MOST_GRADIENT_ERROR)
        return self._errors

    def _compare(self) -> dict[str, float]:
        actor = self._config.actor
        spec = model_spec(self._model, dtype="float32")
        params = jax.jit(partial(init_params, spec))(jax.random.key(2))
        make = partial(random_batch, CHECK_ROWS, CHECK_PROMPT, CHECK_RESPONSE)
        batch = jax.jit(lambda: make(self._model.vocab_size))()
        settings = ForwardSettings(dtype=actor.dtype, attention=actor.attention, remat=actor.remat)
        algorithm = build_algorithm(replace(self._config.algorithm, settings={}))
        ours = _losses(spec, settings, algorithm, batch)
        with jax.default_matmul_precision("highest"):
            expected = _reference_losses(spec, batch)
            logprobs, gradient = expected(params)
        found_logprobs, found_gradient = ours(params)
        difference = jnp.sqrt(jnp.mean(jnp.square(found_logprobs - logprobs)))
        return {
            "logprob_error": float(difference),
            "gradient_error": relative_error(found_gradient, gradient),
        }


def _losses(
    spec: ModelSpec, settings: ForwardSettings, algorithm: Algorithm, batch: RolloutBatch
) -> Callable[[Any], Any]:
    """parameters -> (log-probs, gradient of the actor's loss) by the learner."""
    loss = policy_loss(algorithm, spec=spec, settings=settings, temperature=1.0)
    fields = {name: x for name, x in vars(batch).items() if x is not None}

    @jax.jit
    def run(params: Any) -> Any:
        logprobs, _ = response_logprobs(
            params,
            batch.prompts,
            batch.prompt_lengths,
            batch.responses,
            spec=spec,
            settings=settings,
        )
        counted = with_counts(fields, jnp.bool_(False))
        return logprobs, jax.grad(lambda p: loss(p, counted)[0])(params)

    return run


def _reference_losses(spec: ModelSpec, batch: RolloutBatch) -> Callable[[Any], Any]:
    """The same written out: whole float32 logits, plain attention, the clipped ratio by hand."""
    tokens = jnp.concatenate([batch.prompts, batch.responses], axis=1)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(q: Any, k: Any, v: Any, cache: None, *, window: int | None) -> Any:
        return attention_reference(q, k, v, window=window), cache

    def logprobs_of(params: Any) -> jax.Array:
        model = bind(spec, params)
        hidden, _ = model(tokens, positions, attend=attend)
        logits = model.logits(hidden[:, batch.prompts.shape[1] - 1 : -1])
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
        assert batch.responses is not None
        return jnp.take_along_axis(logprobs, batch.responses[..., None], axis=2)[..., 0]

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logprobs, advantages = logprobs_of(params), batch.advantages
        assert advantages is not None and batch.old_logprobs is not None
        ratio = jnp.exp(logprobs - batch.old_logprobs)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        # ppo()'s bound for negative advantages (arXiv:1912.09729), with its factor of 3.
        bounded = jnp.maximum(gain, 3.0 * advantages)
        return -jnp.mean(jnp.where(advantages < 0, bounded, gain)), logprobs

    @jax.jit
    def run(params: Any) -> Any:
        gradient, logprobs = jax.grad(loss, has_aux=True)(params)
        return logprobs, gradient

    return run


def training_cases(options: Options) -> Sequence[Case]:
    """Every pass on every batch of every shape."""
    cases = []
    for shape in options.shapes:
        config = options.config(shape)
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        checks = Checks(shape, config)
        for work in training_workloads(options, shape):
            if work.rows % config.mesh.num_replicas or work.tokens < 2:
                raise ValueError(
                    f"{work.name}: rows must divide over {config.mesh.num_replicas} replicas and "
                    "have 2 tokens or more; change --batch"
                )
            cases.append(Training(shape, work, options, mesh, checks))
    return cases
