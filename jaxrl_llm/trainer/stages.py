"""The stages of online RL: what each reads, writes, and which role runs it.

Nothing here knows an algorithm's name: which fields a stage reads comes from the signatures of
the functions that the `Algorithm` holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.advantages import score_to_rewards
from jaxrl_llm.algorithms.alias import Algorithm
from jaxrl_llm.algorithms.fields import COMPUTED_FROM, UPDATE_FIELDS, field_names
from jaxrl_llm.algorithms.kl import batch_kl
from jaxrl_llm.algorithms.mismatch import MULT_PROB_ERROR, mismatch_metrics
from jaxrl_llm.distributed.mesh import REPLICA_AXES, num_replicas
from jaxrl_llm.generation.engine import (
    GenerationOutput,
    Quantization,
    compiler_options,
    generate_on_mesh,
)
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.learner.forward import (
    response_logprobs,
    response_scores,
    response_statistics,
    response_values,
)
from jaxrl_llm.learner.losses import policy_loss, value_loss, with_counts
from jaxrl_llm.learner.micro_batches import MicroBatches
from jaxrl_llm.learner.rows import Fields, rows_of
from jaxrl_llm.learner.train_state import TrainState, cast
from jaxrl_llm.learner.train_step import NONFINITE, Measure, over_mini_batches, train_step
from jaxrl_llm.numerics import masked_mean
from jaxrl_llm.observability.metrics import batch_metrics
from jaxrl_llm.trainer.dataflow import DEVICE, HOST, Stage, StageOutput
from jaxrl_llm.trainer.roles import Role, params_of

KL_CONTROLLER = "kl_controller"
GREEDY_SCORE = "critic/greedy_score/mean"
ROW = ("prompts", "prompt_lengths", "responses", "mask")


@dataclass(frozen=True, kw_only=True)
class UpdateSizes:
    """How a role's passes walk through the samples of an iteration; all counts are global."""

    num_mini_batches: int
    num_epochs: int
    update: MicroBatches  # of one mini-batch
    forward: MicroBatches  # of the whole batch, in passes without gradient
    shuffle_seed: int | None = None  # of the order in which mini-batches take the samples


def shard_stacked(mesh: Mesh) -> Callable[[Any], Any]:
    """Constrains stacked [M, B/M, ...] arrays so that every slice spreads over the replicas."""
    if mesh.size == 1:
        return lambda tree: tree
    sharding = NamedSharding(mesh, PartitionSpec(None, REPLICA_AXES))
    return lambda tree: jax.lax.with_sharding_constraint(tree, sharding)


def shard_rows(mesh: Mesh) -> Callable[[Any], Any]:
    """Constrains arrays of rows, one row a replica, to lie with their replica."""
    if mesh.size == 1:
        return lambda tree: tree
    sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXES))
    return lambda tree: jax.lax.with_sharding_constraint(tree, sharding)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How the actor generates, whatever it is for."""

    samples: int  # of a batch, over all replicas
    group: int  # samples a prompt
    num_slots: int
    cache_tokens: int
    dtype: str
    quantization: Quantization
    seed: int
    pad_id: int

    def run(
        self,
        role: Role,
        state: Any,
        step: jax.Array,
        prompts: Any,
        lengths: Any,
        sample_ids: Any,
        *,
        sampling: SamplingParams,
        group: int,
        num_slots: int,
    ) -> GenerationOutput:
        """Responses of the actor, in its generation layout."""
        return generate_on_mesh(
            role.spec,
            cast(params_of(state), self.dtype),
            prompts,
            lengths,
            sample_ids,
            jax.random.fold_in(jax.random.key(self.seed), step),
            sampling=sampling,
            group=group,
            num_slots=num_slots,
            cache_tokens=self.cache_tokens,
            mesh=role.mesh,
            attention=role.forward.attention,
            quantization=self.quantization,
            pad_id=self.pad_id,
        )

    def compiler_options(self, role: Role) -> dict[str, bool]:
        """XLA's, for a program that generates a batch, greedy answers beside it or not."""
        return compiler_options(self.samples // num_replicas(role.mesh), self.num_slots)


def generate_stage(role: Role, how: Generation, *, sampling: SamplingParams) -> Stage:
    """Samples responses from the actor in its generation layout, `group` a prompt."""

    def fn(state: Any, step: jax.Array, *fields: jax.Array) -> StageOutput:
        out = how.run(
            role,
            state,
            step,
            *fields,
            sampling=sampling,
            group=how.group,
            num_slots=how.num_slots,
        )
        slot_steps = out.slot_steps.sum()
        metrics = {
            "rollout/decode_steps": out.steps.max(),
            "rollout/prefills": out.prefills.max(),
            "rollout/slot_use": out.live_slot_steps.sum() / slot_steps,
            "rollout/slots_waiting": out.stalled_slot_steps.sum() / slot_steps,
        }
        return StageOutput(writes=(out.tokens, out.mask, out.logprobs), metrics=metrics)

    return Stage(
        name="gen",
        fn=fn,
        reads=("prompts", "prompt_lengths", "sample_ids"),
        writes=("responses", "mask", "rollout_logprobs"),
        role=role.name,
        compiler_options=how.compiler_options(role),
    )


def greedy_stage(role: Role, how: Generation, *, sampling: SamplingParams) -> Stage:
    """The actor's most likely answer to each prompt, on the first sample of its group."""
    greedy = replace(sampling, temperature=0.0)

    def fn(
        state: Any, step: jax.Array, prompts: Any, lengths: jax.Array, sample_ids: Any
    ) -> StageOutput:
        rows = lengths.shape[0]
        first = jnp.arange(rows) % how.group == 0
        # The others of a group are rows without a prompt, which generate nothing and take no slot.
        lengths = jnp.where(first, lengths, 0)
        slots = how.num_slots or -(-rows // (num_replicas(role.mesh) * how.group))
        out = how.run(
            role,
            state,
            step,
            prompts,
            lengths,
            sample_ids,
            sampling=greedy,
            group=1,
            num_slots=slots,
        )
        return StageOutput(writes=(out.tokens, out.mask, out.logprobs), metrics={})

    return Stage(
        name="gen_max",
        fn=fn,
        reads=("prompts", "prompt_lengths", "sample_ids"),
        writes=("greedy_responses", "greedy_mask", "greedy_logprobs"),
        role=role.name,
        compiler_options=how.compiler_options(role),
    )


def old_logprob_stage(
    role: Role,
    sizes: UpdateSizes,
    *,
    temperature: float,
    with_squares: bool = False,
) -> Stage:
    """Log-probs of the policy before its update, and how far the sampler's are from them.

    `with_squares` also writes `sum_pi_squared`, for which the head is computed twice.
    """

    def fn(state: Any, step: jax.Array, *fields: jax.Array) -> StageOutput:
        *row, rollout = fields
        mask = row[-1]

        def forward(part: Fields) -> Any:
            found = response_statistics(
                params_of(state),
                rows_of(part),
                spec=role.spec,
                settings=role.forward,
                temperature=temperature,
                with_entropy=True,
                with_squares=with_squares,
            )
            return found.logprobs, found.entropy, found.sum_squares

        old, entropy, squares = sizes.forward.join(forward, row_fields(row))
        metrics = _policy_metrics(old, entropy, rollout, mask)
        return StageOutput(writes=(old, squares) if with_squares else (old,), metrics=metrics)

    return Stage(
        name="old_log_prob",
        fn=fn,
        reads=(*ROW, "rollout_logprobs"),
        writes=("old_logprobs", "sum_pi_squared") if with_squares else ("old_logprobs",),
        role=role.name,
    )


def _policy_metrics(logprobs: Any, entropy: Any, rollout: Any, mask: Any) -> dict[str, jax.Array]:
    """Of the policy before its update: its entropy, and how far the sampler's is from it."""
    metrics = mismatch_metrics(logprobs, rollout, mask)
    return metrics | {"actor/entropy": masked_mean(entropy, mask)}


def correction_stage(algorithm: Algorithm) -> Stage:
    """Rollout correction: what the algorithm weighs and rejects."""
    named = {"importance_weights": algorithm.importance, "loss_mask": algorithm.rejection}
    functions = {name: fn for name, fn in named.items() if fn is not None}
    reads = tuple(dict.fromkeys(n for fn in functions.values() for n in field_names(fn)))

    def fn(state: Any, step: jax.Array, *values: jax.Array) -> StageOutput:
        known = dict(zip(reads, values, strict=True))
        out = [fn(*(known[name] for name in field_names(fn))) for fn in functions.values()]
        metrics = {name: value for _, found in out for name, value in found.items()}
        return StageOutput(writes=tuple(written for written, _ in out), metrics=metrics)

    return Stage(name="rollout_corr", fn=fn, reads=reads, writes=tuple(functions), role=DEVICE)


def frozen_logprobs_stage(
    role: Role, sizes: UpdateSizes, *, name: str, writes: str, temperature: float
) -> Stage:
    """Log-probs of the samples under a frozen model: the reference, or a teacher."""

    def fn(state: Any, step: jax.Array, *row: jax.Array) -> StageOutput:
        def forward(part: Fields) -> Any:
            return response_logprobs(
                params_of(state),
                rows_of(part),
                spec=role.spec,
                settings=role.forward,
                temperature=temperature,
            )[0]

        logprobs = sizes.forward.join(forward, row_fields(row))
        return StageOutput(writes=(logprobs,), metrics={})

    return Stage(name=name, fn=fn, reads=ROW, writes=(writes,), role=role.name)


def values_stage(role: Role, sizes: UpdateSizes) -> Stage:
    """The critic's values before its update."""

    def fn(state: Any, step: jax.Array, *row: jax.Array) -> StageOutput:
        def forward(part: Fields) -> Any:
            settings = role.forward
            return response_values(
                params_of(state), rows_of(part), spec=role.spec, settings=settings
            )

        values = sizes.forward.join(forward, row_fields(row))
        return StageOutput(writes=(values,), metrics={})

    return Stage(name="values", fn=fn, reads=ROW, writes=("values",), role=role.name)


def reward_model_stage(role: Role, sizes: UpdateSizes, *, greedy_group: int = 0) -> Stage:
    """A model's score of each sample, on the device.

    `greedy_group` scores the greedy answers instead, for every sample of a group of that size.
    """

    def fn(state: Any, step: jax.Array, *row: jax.Array) -> StageOutput:
        def forward(part: Fields) -> Any:
            return response_scores(
                params_of(state),
                rows_of(part),
                part["mask"],
                spec=role.spec,
                settings=role.forward,
            )

        scores = sizes.forward.join(forward, row_fields(row))
        if not greedy_group:
            return StageOutput(writes=(scores,), metrics={})
        of_groups = scores[::greedy_group]
        metrics = {GREEDY_SCORE: of_groups.mean()}
        return StageOutput(writes=(jnp.repeat(of_groups, greedy_group),), metrics=metrics)

    if greedy_group:
        reads = ("prompts", "prompt_lengths", "greedy_responses", "greedy_mask")
        return Stage(
            name="reward_max", fn=fn, reads=reads, writes=("greedy_scores",), role=role.name
        )
    return Stage(name="reward", fn=fn, reads=ROW, writes=("scores",), role=role.name)


class HostReward(Protocol):
    """Rewards that Python computes, on the host; arrays are numpy."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts that the score is made of."""
        ...

    def __call__(
        self, context: Any, step: int, responses: Any, mask: Any, logprobs: Any
    ) -> StageOutput:
        """Writes the scores [B] and the parts [B, K]."""
        ...

    def greedy(self, context: Any, step: int, responses: Any, mask: Any, logprobs: Any) -> Any:
        """Scores of one answer to each prompt [B / group]."""
        ...


def reward_function_stage(reward: HostReward) -> Stage:
    """Python rewards of the samples, on the host."""
    return Stage(
        name="reward",
        fn=reward,
        reads=("responses", "mask", "rollout_logprobs"),
        writes=("scores", "reward_parts"),
        inner_shapes=((), (len(reward.names),)),
        role=HOST,
    )


def greedy_reward_stage(reward: HostReward, *, group: int) -> Stage:
    """Python rewards of the greedy answers, on the host, for every sample of a group."""

    def fn(context: Any, step: int, *answers: Any) -> StageOutput:
        scores = reward.greedy(context, step, *(x[::group] for x in answers))
        metrics = {GREEDY_SCORE: float(scores.mean())}
        return StageOutput(writes=(scores.repeat(group),), metrics=metrics)

    return Stage(
        name="reward_max",
        fn=fn,
        reads=("greedy_responses", "greedy_mask", "greedy_logprobs"),
        writes=("greedy_scores",),
        inner_shapes=((),),
        role=HOST,
    )


def token_reward_stage(algorithm: Algorithm) -> Stage:
    """Scores to rewards a token; with KL in the reward, less coef * KL, moving the controller."""
    if algorithm.kl_reward is None:

        def place(state: Any, step: jax.Array, scores: Any, mask: Any) -> StageOutput:
            return StageOutput(writes=(score_to_rewards(scores, mask),), metrics={})

        return Stage(
            name="kl", fn=place, reads=("scores", "mask"), writes=("rewards",), role=DEVICE
        )
    kl_reward, controller = algorithm.kl_reward, algorithm.kl_controller

    def penalise(state: Any, step: jax.Array, *fields: jax.Array) -> StageOutput:
        mask = fields[1]
        rewards, kl = kl_reward(*fields, coef=state)
        current = batch_kl(kl, mask)
        metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": state}
        moved = controller.update(state, current, mask.shape[0])
        return StageOutput(writes=(rewards,), metrics=metrics, state=moved)

    return Stage(
        name="kl",
        fn=penalise,
        reads=field_names(kl_reward),
        writes=("rewards",),
        role=KL_CONTROLLER,
        updates=True,
    )


def advantage_stage(algorithm: Algorithm, *, max_response_length: int) -> Stage:
    """Advantages and returns, and the metrics of the whole batch."""
    reads = field_names(algorithm.advantage)
    measured = ("prompt_lengths", "group_ids", "mask", "scores", "rewards")
    fields = tuple(dict.fromkeys((*reads, *measured)))

    def fn(state: Any, step: jax.Array, *values: jax.Array) -> StageOutput:
        known: dict[str, Any] = dict(zip(fields, values, strict=True))
        advantages, returns = algorithm.advantage(*(known[name] for name in reads))
        known |= {"advantages": advantages, "returns": returns}
        metrics = batch_metrics(**known, max_response_length=max_response_length)
        return StageOutput(writes=(advantages, returns), metrics=metrics)

    return Stage(name="adv", fn=fn, reads=fields, writes=("advantages", "returns"), role=DEVICE)


def update_actor_stage(
    role: Role,
    algorithm: Algorithm,
    sizes: UpdateSizes,
    *,
    temperature: float,
    critic_warmup: int = 0,
    own_logprobs: bool = False,
) -> Stage:
    """All epochs and mini-batches of the policy update. It rests while only the critic warms up.

    With `own_logprobs` it is a single step, whose forward pass gives the old log-probs and the
    metrics of the old_log_prob stage too.
    """
    loss = policy_loss(
        algorithm,
        spec=role.spec,
        settings=role.forward,
        temperature=temperature,
        own_logprobs=own_logprobs,
    )
    reads = _update_reads(algorithm.policy_loss, algorithm.kl_loss)
    if algorithm.rejection is not None:
        reads = (*reads, "loss_mask")
    if own_logprobs:
        assert sizes.num_mini_batches == sizes.num_epochs == 1 and critic_warmup == 0
        reads = tuple(dict.fromkeys((*reads, "rollout_logprobs")))
        reads = tuple(name for name in reads if name != "old_logprobs")

    def measure(samples: Any, batch: Fields) -> dict[str, jax.Array]:
        logprobs, entropy = samples
        return _policy_metrics(logprobs, entropy, batch["rollout_logprobs"], batch["mask"])

    def fn(state: TrainState, step: jax.Array, *values: jax.Array) -> StageOutput:
        fields = dict(zip(reads, values, strict=True))
        update = _updater(
            role, loss, sizes, fields, step, "actor", measure if own_logprobs else None
        )
        if critic_warmup == 0:
            state, metrics = update(state)
        else:
            _, shapes = jax.eval_shape(update, state)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            state, metrics = jax.lax.cond(
                step > critic_warmup, update, lambda state: (state, zeros), state
            )
        return StageOutput(metrics=metrics, state=state)

    return Stage(name="update_actor", fn=fn, reads=reads, role=role.name, updates=True)


def update_critic_stage(role: Role, algorithm: Algorithm, sizes: UpdateSizes) -> Stage:
    """All epochs and mini-batches of the value update."""
    assert algorithm.value_loss is not None
    loss = value_loss(algorithm, spec=role.spec, settings=role.forward)
    reads = _update_reads(algorithm.value_loss)

    def fn(state: TrainState, step: jax.Array, *values: jax.Array) -> StageOutput:
        fields = dict(zip(reads, values, strict=True))
        update = _updater(role, loss, sizes, fields, step, "critic")
        state, metrics = update(state)
        return StageOutput(metrics=metrics, state=state)

    return Stage(name="update_critic", fn=fn, reads=reads, role=role.name, updates=True)


def _update_reads(*functions: Callable[..., Any] | None) -> tuple[str, ...]:
    """What an update takes from the batch: its rows, and the fields that its functions name."""
    named = [name for fn in functions if fn is not None for name in field_names(fn)]
    named += [field for name in named for field in COMPUTED_FROM.get(name, ())]
    return tuple(dict.fromkeys((*ROW, *(n for n in named if n not in UPDATE_FIELDS))))


def row_fields(row: Sequence[jax.Array]) -> Fields:
    """The arrays of a stage that reads `ROW`, by name."""
    return dict(zip(ROW, row, strict=True))


def _updater(
    role: Role,
    loss: Any,
    sizes: UpdateSizes,
    fields: dict[str, jax.Array],
    iteration: jax.Array,
    prefix: str,
    measure: Measure | None = None,
) -> Callable[[TrainState], tuple[TrainState, dict[str, jax.Array]]]:
    """state -> (state, metrics averaged over optimizer steps), named `prefix/...`."""
    assert role.optimizer is not None and role.learning_rate is not None
    shard = shard_stacked(role.mesh)
    step = partial(
        train_step,
        loss=loss,
        optimizer=role.optimizer,
        learning_rate=role.learning_rate,
        max_grad_norm=role.max_grad_norm,
        cast_ahead=role.forward.cast_ahead,
        micro_batches=sizes.update,
        measure=measure,
    )

    key = None
    if sizes.shuffle_seed is not None:
        key = jax.random.fold_in(jax.random.key(sizes.shuffle_seed), iteration)

    def update(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        state, steps = over_mini_batches(
            state,
            fields,
            step=lambda state, batch, first: step(state, with_counts(batch, first)),
            num_mini_batches=sizes.num_mini_batches,
            num_epochs=sizes.num_epochs,
            shard=shard,
            shuffle_key=key,
        )
        flags = steps.pop(NONFINITE).any(axis=0)
        steps.pop("loss")
        metrics = {
            name if "/" in name or name == MULT_PROB_ERROR else f"{prefix}/{name}": (
                x.astype(jnp.float32).mean()
            )
            for name, x in steps.items()
        }
        return state, metrics | {f"{prefix}/{NONFINITE}": flags}

    return update
