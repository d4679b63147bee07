"""Training: the actor's update and the passes without gradient, as the stages run them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.harness import Case, CheckFailed, relative_error, require
from benchmarks.iteration import planned
from benchmarks.options import Options
from benchmarks.roofline import H200
from benchmarks.workloads import TrainingWorkload, training_workloads
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.config import ActorConfig, Config, CriticConfig, Custom, apply_overrides, check
from jaxrl_llm.distributed.layout import mesh_of
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.kernels.flash_attention import attention_reference
from jaxrl_llm.kernels.gated_delta.inputs import Inputs, activated, einsum
from jaxrl_llm.learner.forward import ForwardSettings, response_logprobs, response_values
from jaxrl_llm.learner.losses import PolicyLoss, with_counts
from jaxrl_llm.learner.micro_batches import MicroBatches, Packed, Padded
from jaxrl_llm.learner.rows import ROUTES, rows_of
from jaxrl_llm.learner.train_step import accumulate
from jaxrl_llm.models.attention import Mixers
from jaxrl_llm.models.base import ModelSpec, bind, init_params, init_sharded, model_spec
from jaxrl_llm.models.config import Mixture, ModelConfig
from jaxrl_llm.models.experts import Routing
from jaxrl_llm.models.flops import forward_flops, training_flops

# Of log-probs (nats) and values, root mean square, and of gradients (relative L2) in bf16, at
# CHECK_LAYERS layers of the shape, against float32.
MOST_ERRORS = {"logprob_error": 0.05, "gradient_error": 0.05, "value_error": 0.05}
CHECK_LAYERS = 2
CHECK = TrainingWorkload(
    name="check", kind="update", samples=2, prompt_lengths=(16, 16), limits=(48, 31, 17, 48)
)
CHECK_ROW_TOKENS = 128  # where rows are packed: two rows of samples and of parts of groups
CLIP = 0.2
LOG_RATIOS = (-0.5, -0.1, 0.1, 0.5, 1.5)  # both sides of 1 - clip, 1 + clip and the dual clip's 3

Fields = dict[str, jax.Array]


# The trainer's stage for each kind of pass.
STAGES = {
    "update": "update_actor",
    "logprob": "old_log_prob",
    "reference": "ref",  # frozen weights in the dtype of computation
    "values": "values",
}


class Training(Case):
    """One pass over one batch: the trainer's own stage, compiled with a donated state."""

    benchmark = "training"

    def __init__(
        self,
        shape: str,
        model: ModelConfig,
        work: TrainingWorkload,
        config: Config,
        mesh: Mesh,
        checks: "Checks",
    ) -> None:
        self.shape, self.name, self.work, self.mesh = shape, work.name, work, mesh
        self.model, self.checks = model, checks
        (phase,) = planned(_sized(config, work), mesh).phases
        stages = [stage for stage in phase.stages if stage.name == STAGES[work.kind]]
        if not stages:
            raise ValueError(
                f"config.algorithm={config.algorithm.label} has no stage {STAGES[work.kind]}; drop "
                f"the workload {work.kind}, or name another algorithm with --config.algorithm"
            )
        self.stage = stages[0]
        role = phase.roles[self.stage.role]
        # A pass without gradient needs the parameters only.
        self.role = role if work.kind == "update" else replace(role, optimizer=None)

    def lower(self) -> dict[str, jax.stages.Lowered]:
        fields = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(self.mesh))
            for name, x in jax.eval_shape(self._fields).items()
        }
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self.mesh))
        update = self.work.kind == "update"
        outputs = (self.role.shardings, None) if update else batch_sharding(self.mesh)
        program = jax.jit(self._pass, donate_argnums=(0,) if update else (), out_shardings=outputs)
        main = program.lower(self.role.abstract(), step, fields)
        return {"main": main} | self.checks.lower(self.work.kind)

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.program = programs["main"]
        # Before the arrays are made: the check frees its own when it returns.
        self.errors = self.checks.run(self.work.kind, programs)
        self.fields = jax.jit(self._fields, out_shardings=batch_sharding(self.mesh))()
        self.step = jax.device_put(jnp.int32(1), replicated(self.mesh))
        role = self.role
        params = init_sharded(role.spec, jax.random.key(0), role.param_shardings)
        self.state = role.state(params)

    def check(self) -> dict[str, float]:
        """Errors of the reduced model; the full model must give finite numbers."""
        out = self.run()
        values = out["actor/grad_norm"] if self.work.kind == "update" else out
        finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(values))
        if not finite:
            raise CheckFailed("the full model gives numbers that are not finite")
        return self.errors

    def run(self) -> Any:
        if self.work.kind == "update":
            self.state, metrics = self.program(self.state, self.step, self.fields)
            return metrics
        return self.program(self.state, self.step, self.fields)

    def figures(self, seconds: float) -> dict[str, float]:
        work, devices = self.work, self.mesh.size
        count = training_flops if work.kind == "update" else forward_flops
        flops = count(self.model, work.lengths) / seconds / devices
        return {
            "tokens/s": sum(work.lengths) / seconds,
            "TFLOP/s": flops / 1e12,
            "fraction of 790 TFLOP/s": flops / H200.peak,
        }

    def _pass(self, state: Any, step: jax.Array, fields: Fields) -> Any:
        out = self.stage(state, step, **fields)
        return (out.state, out.metrics) if self.work.kind == "update" else out.writes

    def _fields(self) -> Fields:
        fields = random_fields(self.work, self.model)
        return {name: fields[name] for name in self.stage.reads}


def _sized(config: Config, work: TrainingWorkload) -> Config:
    """`config` of an iteration whose one mini-batch is `work`.

    Log-probs have a pass of their own where there is more than one update: here in a second epoch.
    The reference's have one where the loss has a KL term.
    """
    data = replace(
        config.data,
        train_batch_size=work.prompts,
        max_prompt_length=work.prompt_length,
        max_response_length=max(work.limits),
    )
    config = replace(
        config,
        data=data,
        actor=replace(
            config.actor,
            ppo_mini_batch_size=work.prompts,
            ppo_epochs=2 if work.kind == "logprob" else 1,
        ),
        rollout=replace(config.rollout, n=work.samples),
    )
    if work.kind == "reference":
        config = apply_overrides(config, {"algorithm.use_kl_loss": True})
    check(config)
    return config


def random_fields(work: TrainingWorkload, model: ModelConfig) -> Fields:
    """Random tokens, and every field of a batch that a stage may read; pure.

    A mixture has random experts for each token, as if a sampler had recorded them. Left to choose,
    bfloat16 and float32 take other experts for some tokens, and compute different functions.
    """
    keys, vocab_size = iter(jax.random.split(jax.random.key(1), 16)), model.vocab_size
    rows, response = work.rows, max(work.limits)

    def tokens(rows: int, length: int) -> jax.Array:
        return jax.random.randint(next(keys), (rows, length), 0, vocab_size, jnp.int32)

    def normal(scale: float = 1.0) -> jax.Array:
        return scale * mask * jax.random.normal(next(keys), (rows, response))

    mask = jnp.arange(response) < jnp.asarray(work.limits)[:, None]
    mask = mask.astype(jnp.float32)
    old = -jnp.log(float(vocab_size)) * mask + normal(0.1)
    prompts = tokens(work.prompts, work.prompt_length)
    routes = {}
    if model.mixture is not None:
        shape = rows, work.prompt_length + response, model.num_layers
        routes[ROUTES] = _random_routes(next(keys), shape, model.mixture)
    return routes | {
        "prompts": jnp.repeat(prompts, work.samples, axis=0),
        "prompt_lengths": jnp.repeat(jnp.asarray(work.prompt_lengths, jnp.int32), work.samples),
        "sample_ids": jnp.arange(rows, dtype=jnp.uint32),
        "responses": tokens(rows, response),
        "response_lengths": jnp.asarray(work.limits, jnp.int32),
        "mask": mask,
        "rollout_logprobs": old + normal(0.01),
        "old_logprobs": old,
        "reference_logprobs": old + normal(0.1),
        "values": normal(),
        "scores": jax.random.normal(next(keys), (rows,)),
        "rewards": normal(),
        "advantages": normal(),
        "returns": normal(),
        "importance_weights": mask,
    }


def _random_routes(key: jax.Array, shape: tuple[int, ...], mixture: Mixture) -> jax.Array:
    """Different experts [*shape, K] for each token and layer, each expert as likely as another."""
    E, K = mixture.num_experts, mixture.experts_per_token
    first = jax.random.randint(key, (*shape, 1), 0, E, jnp.int32)
    return ((first + jnp.arange(K) * (E // K)) % E).astype(jnp.int16)


class Checks:
    """The shape, cut to a few layers, against float32: log-probs and the PPO gradient, or values.

    In rows that are padded or packed as the config says. Shared by the cases of a shape: compiled
    once, run once.
    """

    def __init__(self, model: ModelConfig, config: Config) -> None:
        # A hybrid keeps a whole period of its layers: without one it has no attention.
        period = 1 if model.delta is None else model.delta.period
        layers = min(max(CHECK_LAYERS, period), model.num_layers)
        self._model = replace(model, num_layers=layers, sliding_window=())
        self._config = config
        self._lowered: dict[str, dict[str, jax.stages.Lowered]] = {}
        self._errors: dict[str, dict[str, float]] = {}

    def lower(self, kind: str) -> dict[str, jax.stages.Lowered]:
        """Lower the learner's passes of `kind`, and the reference."""
        part = _part(kind)
        if part not in self._lowered:
            spec, fields = self._spec(part), jax.eval_shape(self._fields)
            ours, reference = self._values(spec) if part == "values" else self._gradients(spec)
            programs = {f"learner {part}": jax.jit(ours).lower(spec.params, fields)}
            with jax.default_matmul_precision("highest"):
                lowered = jax.jit(reference).lower(spec.params, fields)
            self._lowered[part] = programs | {f"reference {part}": lowered}
        return self._lowered[part]

    def run(self, kind: str, programs: dict[str, jax.stages.Compiled]) -> dict[str, float]:
        """Errors by name; CheckFailed where one is too large."""
        part = _part(kind)
        if part not in self._errors:
            check = _values_errors if part == "values" else _gradient_errors
            params = jax.jit(partial(init_params, self._spec(part)))(jax.random.key(2))
            fields = jax.jit(self._fields)()
            learner, reference = (programs[f"{who} {part}"] for who in ("learner", "reference"))
            self._errors[part] = check(learner, reference, params, fields)
        for name, error in self._errors[part].items():
            require(name, error, MOST_ERRORS[name])
        return self._errors[part]

    def _spec(self, part: str) -> ModelSpec:
        return model_spec(self._model, "scalar" if part == "values" else "causal_lm", "float32")

    def _gradients(self, spec: ModelSpec) -> tuple[Callable[..., Any], Callable[..., Any]]:
        settings, rows = _how(self._config.actor, together=not self._config.actor.shuffle)
        # The algorithm with its defaults, which the reference is written for.
        chosen = self._config.algorithm
        plain = Custom(path=chosen.path) if isinstance(chosen, Custom) else type(chosen)()
        algorithm = build_online(plain)
        ours = learner_gradient(spec, settings, algorithm, rows)
        return ours, partial(reference_gradient, spec)

    def _values(self, spec: ModelSpec) -> tuple[Callable[..., Any], Callable[..., Any]]:
        settings, rows = _how(self._config.critic)
        return learner_values(spec, settings, rows), partial(reference_values, spec)

    def _fields(self) -> Fields:
        return random_fields(CHECK, self._model)


def _part(kind: str) -> str:
    return "values" if kind == "values" else "policy"


def _how(
    role: ActorConfig | CriticConfig, *, together: bool = True
) -> tuple[ForwardSettings, MicroBatches]:
    """The forward settings of a role, on one device; rows of fewer tokens where it packs them.

    `together`: the samples of a prompt come together, so that rows may share it.
    """
    settings = ForwardSettings(dtype=role.dtype, attention=role.attention, remat=role.remat)
    if not role.micro_batch_tokens:
        return settings, Padded()
    group = CHECK.samples if role.share_prompts and together else 1
    tokens = min(role.micro_batch_tokens, CHECK_ROW_TOKENS)
    return settings, Packed(row_tokens=tokens, group=group)


def _gradient_errors(learner: Any, reference: Any, params: Any, fields: Fields) -> dict[str, float]:
    logprobs, _ = reference(params, fields)
    # Ratios far from where the loss bends: there rounding would decide the gradient.
    apart = np.resize(LOG_RATIOS, logprobs.shape).astype(np.float32)
    fields = fields | {"old_logprobs": logprobs - apart}
    own_logprobs, own_gradient = learner(params, fields)
    logprobs, gradient = reference(params, fields)
    return {
        "logprob_error": _root_mean_square(own_logprobs - logprobs, fields["mask"]),
        "gradient_error": relative_error(own_gradient, gradient),
    }


def _values_errors(learner: Any, reference: Any, params: Any, fields: Fields) -> dict[str, float]:
    # A new head predicts 0 everywhere.
    kernel = params["score"]["kernel"]
    drawn = jax.random.normal(jax.random.key(3), kernel.shape) * kernel.shape[0] ** -0.5
    params = params | {"score": {"kernel": drawn.astype(kernel.dtype)}}
    apart = learner(params, fields) - reference(params, fields)
    return {"value_error": _root_mean_square(apart, fields["mask"])}


def _root_mean_square(x: jax.Array, mask: jax.Array) -> float:
    """Over the tokens of the mask; NaN where one of them is."""
    return float(jnp.sqrt(jnp.square(jnp.where(mask > 0, x, 0)).sum() / mask.sum()))


def learner_gradient(
    spec: ModelSpec, settings: ForwardSettings, algorithm: Algorithm, rows: MicroBatches
) -> Callable[[Any, Fields], Any]:
    """(parameters, fields) -> (log-probs, gradient of the actor's loss) by the learner."""
    loss = PolicyLoss(algorithm=algorithm, spec=spec, settings=settings, temperature=1.0)

    def run(params: Any, fields: Fields) -> tuple[jax.Array, Any]:
        def logprobs(part: Fields) -> jax.Array:
            return response_logprobs(params, rows_of(part), spec=spec, settings=settings)[0]

        counted = with_counts(fields, jnp.bool_(False))
        gradient, _ = accumulate(
            loss, params, counted, cast_ahead=settings.cast_ahead, micro_batches=rows
        )
        return rows.join(logprobs, fields), gradient

    return run


def learner_values(
    spec: ModelSpec, settings: ForwardSettings, rows: MicroBatches
) -> Callable[[Any, Fields], Any]:
    """(parameters, fields) -> the critic's values by the learner."""

    def run(params: Any, fields: Fields) -> jax.Array:
        def values(part: Fields) -> jax.Array:
            return response_values(params, rows_of(part), spec=spec, settings=settings)

        return rows.join(values, fields)

    return run


def reference_gradient(spec: ModelSpec, params: Any, fields: Fields) -> tuple[jax.Array, Any]:
    """The same by hand: whole float32 logits, plain attention, the clipped ratio."""
    responses, mask = fields["responses"], fields["mask"]
    advantages = fields["advantages"]

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        model = bind(spec, params)
        logits = model.logits(_reference_hidden(model, fields)).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), responses[..., None], axis=2)
        logprobs = chosen[..., 0]
        ratio = jnp.exp(logprobs - fields["old_logprobs"])
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        gain = jnp.minimum(ratio * advantages, clipped * advantages)
        # ppo()'s bound for negative advantages (arXiv:1912.09729), with its factor of 3.
        bounded = jnp.maximum(gain, 3.0 * advantages)
        gain = jnp.where(advantages < 0, bounded, gain)
        return -jnp.sum(gain * mask) / jnp.sum(mask), logprobs

    gradient, logprobs = jax.grad(loss, has_aux=True)(params)
    return logprobs, gradient


def reference_values(spec: ModelSpec, params: Any, fields: Fields) -> jax.Array:
    """One row a sample, plain attention."""
    model = bind(spec, params)
    return model.scores(_reference_hidden(model, fields))


def _reference_hidden(model: Any, fields: Fields) -> jax.Array:
    """The states before each response token [B, R, D], one row a sample."""
    tokens = jnp.concatenate([fields["prompts"], fields["responses"]], axis=1)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(q: Any, k: Any, v: Any, cache: None, **of_layer: Any) -> Any:
        return attention_reference(q, k, v, **of_layer), cache

    def recur(inputs: Inputs, cache: None) -> Any:
        return _token_by_token(inputs), cache

    routing = Routing(chosen_BTLK=fields[ROUTES]) if ROUTES in fields else None
    mixers = Mixers(attend, recur)
    hidden, *_ = model.routed(tokens, positions, attend=mixers, routing=routing)
    return hidden[:, fields["prompts"].shape[1] - 1 : -1]


def _token_by_token(inputs: Inputs) -> jax.Array:
    """The gated delta rule in a loop over the tokens of rows without padding, by no kernel.

    B rows, T tokens, N heads, H dims of a key, V of a value.
    """
    q, k, v = activated(*map(_convolved, inputs.streams, inputs.kernels))
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))

    def step(memory_BNHV: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_BNH, k_BNH, v_BNV, decay_BN, rate_BN = token
        memory_BNHV *= decay_BN[..., None, None]
        known_BNV = einsum("BNHV,BNH->BNV", memory_BNHV, k_BNH)
        written_BNV = rate_BN[..., None] * (v_BNV - known_BNV)
        memory_BNHV += k_BNH[..., None] * written_BNV[..., None, :]
        return memory_BNHV, einsum("BNHV,BNH->BNV", memory_BNHV, q_BNH)

    tokens = (q, k, v, jnp.exp(inputs.log_decay_BTN), inputs.rate_BTN)
    empty_BNHV = jnp.zeros((len(q), *k.shape[2:], v.shape[-1]), jnp.float32)
    out_TBNV = jax.lax.scan(step, empty_BNHV, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))[1]
    return jnp.moveaxis(out_TBNV, 0, 1)


def _convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Each dim [B, T, ...] plus the dims of tokens before it, by its weights [..., W]; float32."""
    width, length = kernel.shape[-1], x.shape[1]
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (width - 1, 0), *[(0, 0)] * (x.ndim - 2)))
    taps = [x[:, i : i + length] * kernel[..., i] for i in range(width)]
    return sum(taps[1:], taps[0])


def training_cases(options: Options) -> Sequence[Case]:
    """Every pass on every batch of every shape."""
    cases = []
    for shape in options.shapes:
        config = options.config(shape)
        model = options.shapes[shape]
        mesh = mesh_of(config.mesh, [model.num_kv_heads])
        checks = Checks(model, config)
        for work in training_workloads(options, shape):
            if min(work.limits) < 1:
                raise ValueError(f"{work.name} leaves no response; --batch needs more tokens")
            cases.append(Training(shape, model, work, config, mesh, checks))
    return cases
