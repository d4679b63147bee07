"""The first states of a run's roles, what a checkpoint has of them, and the bases of adapters."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.build import build_offline
from jaxrl_llm.arguments import seed_of
from jaxrl_llm.checkpoint.identity import (
    LEARNER,
    MODELS,
    SETTING,
    TOKENIZER,
    Identity,
    model_record,
    package_versions,
)
from jaxrl_llm.checkpoint.layout import OPTIMIZER
from jaxrl_llm.checkpoint.stored_models import Record
from jaxrl_llm.config import SFT, Config, ConfigError, PairwiseRewardModel, SupervisedConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.run_data import preference_data, sft_batches
from jaxrl_llm.distributed.multihost import fetch, make_global, place_held
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.distributed.transfer import call
from jaxrl_llm.evaluation.evaluate import AnswerEvaluation, Evaluation, RecordEvaluation, Validator
from jaxrl_llm.learner.offline_losses import means
from jaxrl_llm.learner.train_state import Params, TrainState
from jaxrl_llm.models.base import ModelSpec, scalar_params_from
from jaxrl_llm.models.casting import cast
from jaxrl_llm.models.frozen import quantized_as
from jaxrl_llm.plan.models import spec_of
from jaxrl_llm.plan.offline import plan_supervised
from jaxrl_llm.plan.offline_stages import HELD_OUT, TRAIN, ReferenceTables
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.reference import Making, copying
from jaxrl_llm.plan.roles import CRITIC_BASE, REFERENCE, TEACHER, Role, make_role
from jaxrl_llm.plan.weights import first_adapters, load_params, read_base, record_of_base
from jaxrl_llm.program.stage import States
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.batches import OfflineRecords, RecordBatches, records_held
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.training import Training

STATE = "state"  # in a checkpoint: the array or list of a state that is no tree of parameters
SEEDS = {"actor": 0, "critic": 1, "reward": 2, TEACHER: 3}  # streams of the run's seed
# The trainings that come first are yielded; what is left is the states.
FirstStates = Generator[Training, None, States]
Supervised = dict[str, "SupervisedTraining"]  # by the role that learns


# ------------------------------------------------------------------------- first states


def untrained_states(plan: Plan) -> States:
    """Weights loaded or drawn, the others derived from the learner's; nothing is trained.

    The reference is a copy of the learner. So is the decoder of a scalar model without weights of
    its own.
    """
    states: States = {}
    params = _load_learner(plan, plan.learner.base or plan.learner.name)
    for name in _others(plan):
        states[name] = _first_state(plan, name, params, states)
    return _with_learner(plan, states, params)


def first_states(
    plan: Plan, trainings: Supervised, output: RunOutput, records: OfflineRecords | None
) -> FirstStates:
    """`untrained_states`, with `trainings` in between, whose data are given up after each.

    The learner's warm-up comes first: the reference is the learner after it, and so is the critic's
    decoder. Of a reference that is precomputed, only its log-probs of `records` are kept.
    """
    roles, base = plan.roles, plan.learner.base
    warmup = trainings.pop("actor", None)
    if warmup is None:
        params = _load_learner(plan, base or plan.learner.name)
    else:
        source, seed = plan.sources[plan.learner.name], role_seed(plan.config, plan.learner.name)
        params = load_params(warmup.role, source, seed)
        training = warmup.begin(params, output)
        del params
        yield training
        params = training.take_params()
        if base:
            params = Making(partial(_frozen, roles[base].spec), roles[base])(params)
    states: States = {}
    for name in _others(plan):
        role = roles[name]
        if role.base:
            states[name] = _first_state(plan, name, params, states)
            continue
        own = _derive_or_load(plan, name, params)
        if name in trainings:
            training = trainings.pop(name).begin(own, output)
            del own
            yield training
            own = training.take_params()
        states[name] = role.state(own)
    if plan.tables is not None:
        assert records is not None
        output.message("log-probs of the reference model, once")
        reference = states.pop(plan.tables.role, params)
        states[plan.tables.role] = reference_tables(plan.tables, reference, records)
        del reference
    return _with_learner(plan, states, params)


def _others(plan: Plan) -> list[str]:
    """All roles but the learner and its base, in the order in which they can be made.

    The learner is the last: until then others are derived from its parameters.
    """
    names = [name for name in plan.roles if name not in (plan.learner.name, plan.learner.base)]
    return sorted(names, key=lambda name: bool(plan.roles[name].base))


def _with_learner(plan: Plan, states: States, params: Params) -> States:
    """All states; the learner's parameters, or its base's, are consumed."""
    states |= plan.phases[-1].controller_state()
    role, config = plan.learner, plan.config
    if role.base:
        states[role.base] = params
        params = first_adapters(role, params, config.actor, role_seed(config, role.name))
    states[role.name] = role.state(params)
    return states


def _load_learner(plan: Plan, name: str) -> Params:
    """The learner's weights before training, as the role `name` keeps them."""
    learner = plan.learner.name
    return load_params(plan.roles[name], plan.sources[learner], role_seed(plan.config, learner))


def _in_full(plan: Plan) -> Role:
    """The learner without adapters, as a warm-up trains it."""
    config, role = plan.config, plan.learner
    if not role.base:
        return role
    spec = spec_of(plan.sources[role.name], role.spec.kind, config.actor)
    return make_role(
        role.name, spec, config.actor, role.mesh, phases=config.mesh, exact=config.exact != "off"
    )


def _first_state(plan: Plan, name: str, actor: Params, states: States) -> Any:
    """The state of a role other than the actor. A base of its own is in `states`."""
    role = plan.roles[name]
    if not role.base:
        return role.state(_derive_or_load(plan, name, actor))
    base = actor if role.base == plan.learner.base else states[role.base]
    seed = role_seed(plan.config, name)
    return role.state(first_adapters(role, base, plan.config.critic, seed))


def _derive_or_load(plan: Plan, name: str, actor: Params) -> Params:
    """The parameters of a role other than the actor."""
    role = plan.roles[name]
    if name == REFERENCE:
        source = plan.sources.get(name)
        return copying(role)(actor) if source is None else load_params(role, source, 0)
    of = "critic" if name == CRITIC_BASE else name
    seed = role_seed(plan.config, of)
    if of in plan.sources:
        params = load_params(role, plan.sources[of], seed)
    elif role.spec.kind == "causal_lm":
        return copying(role)(actor)
    else:
        params = _derive_scalar(role, actor, seed)
    extra = {model.name: model for model in plan.config.models}.get(name)
    if extra is None or extra.path or extra.update or role.spec.kind != "scalar":
        return params
    return _with_random_head(role, params, seed)


def _with_random_head(role: Role, params: Params, seed: int) -> Params:
    """The parameters of a scalar model that never learns; a head of zeros would score 0."""
    std, kernel = role.spec.config.initializer_range, role.spec.params["score"]["kernel"]

    def draw(seed: jax.Array) -> Params:
        drawn = std * jax.random.normal(jax.random.key(seed), kernel.shape)
        return {"kernel": drawn.astype(kernel.dtype)}

    place = role.param_shardings["score"]
    placed = make_global(seed_of(seed), replicated(role.mesh))
    return params | {"score": call(jax.jit(draw, out_shardings=place), (placed,), role.mesh)}


def _frozen(spec: ModelSpec, params: Params) -> Params:
    """Weights after a warm-up, as the base of adapters is stored."""
    return quantized_as(spec.params, cast(params, spec.dtype, spec.float32_head))


def _derive_scalar(role: Role, actor: Params, seed: int) -> Params:
    """A scalar model with the actor's decoder."""

    def derive(actor: Params, seed: jax.Array) -> Params:
        # Without the copy, the decoder would be the actor's own buffers.
        return jax.tree.map(jnp.copy, scalar_params_from(actor, role.spec, jax.random.key(seed)))

    return Making(derive, role)(actor, seed)


def role_seed(config: Config, role: str) -> int:
    """The seed of a role's first weights. A user's models share the streams after ours."""
    names = [*SEEDS, *(model.name for model in config.models)]
    return config.seed * len(SEEDS) + names.index(role)


def seed_of_base(config: Config, base: str, learner: str) -> int:
    """The seed of the frozen weights below adapters: the seed of the model that they stand for."""
    return role_seed(config, "critic" if base == CRITIC_BASE else learner)


def reference_tables(tables: ReferenceTables, params: Params, records: OfflineRecords) -> Any:
    """The reference's log-prob of every completion, by table and field: [records] each.

    The batches have the rows of this process. Every device keeps the tables: one number a record.
    """
    stage, mesh = tables.stage, tables.stage.model.mesh
    sharding = batch_sharding(mesh)

    @jax.jit
    def compute(params: Params, rows: dict[str, Any]) -> Any:
        return dict(stage(params, jnp.int32(0), **rows).writes)

    batches = {TRAIN: records.train_batches(), HELD_OUT: records.held_out_batches()}
    result = {}
    for table, size in tables.sizes.items():
        parts: dict[str, list[np.ndarray]] = {name: [] for name in stage.writes}
        for batch in batches[table] if size else ():
            rows = place_held({name: batch[name] for name in stage.reads}, sharding, records.rows)
            for name, values in fetch(compute(params, rows)).items():
                parts[name].append(values)
        if size:
            values = {name: np.concatenate(values)[:size] for name, values in parts.items()}
            result[table] = make_global(values, replicated(mesh))
    return result


# ------------------------------------------------------------------------- supervised trainings


def has_supervised(config: Config) -> bool:
    """True when a new run of `config` begins with a supervised training."""
    teacher, reward_model = config.teacher, config.reward.model
    return (
        config.warmup is not None
        or (teacher is not None and teacher.training is not None)
        or (reward_model is not None and reward_model.training is not None)
    )


@dataclass(frozen=True, kw_only=True)
class SupervisedTraining:
    """A supervised training that a run begins with: all of it but the weights."""

    name: str  # name of its folder
    plan: Plan
    settings: SupervisedConfig
    loader: Loader[Any, Any]
    evaluations: list[Evaluation]

    @property
    def role(self) -> Role:
        """The model that learns, as its weights are laid out."""
        return self.plan.learner

    def begin(self, params: Params, output: RunOutput) -> Training:
        """The training of `params`, which it takes over."""
        prefix = self.plan.phases[-1].stages[-1].name.removeprefix("update_")
        return Training(
            plan=self.plan,
            batches=RecordBatches(loader=self.loader, plan=self.plan),
            states={self.role.name: self.role.state(params)},
            total_steps=self.settings.steps,
            evaluations=self.evaluations,
            output=output.supervised(self.name, self.settings.steps),
            validate_every=self.settings.eval_every,
            target=(f"{prefix}/eval_accuracy", self.settings.stop_at),
            what=f"{prefix} step",
        )


def open_supervised(
    plan: Plan, tokenizer: Tokenizer, validator: Validator | None, run_dir: Path
) -> Supervised:
    """The supervised trainings that a new run begins with, by role. Their data are read.

    Raises: ValueError for data that they cannot learn from, before any weights are loaded.
    """
    config = plan.config
    opening = _Opening(config=config, tokenizer=tokenizer, validator=validator, run_dir=run_dir)
    trainings: Supervised = {}
    if config.warmup is not None:
        trainings["actor"] = opening.sft("warmup", "sft", _in_full(plan), config.warmup)
    teacher, reward_model = config.teacher, config.reward.model
    if TEACHER in plan.roles and teacher is not None and teacher.training is not None:
        trainings[TEACHER] = opening.sft(TEACHER, TEACHER, plan.roles[TEACHER], teacher.training)
    if "reward" in plan.roles and reward_model is not None and reward_model.training is not None:
        center, training = reward_model.center, reward_model.training
        trainings["reward"] = opening.reward_model(plan.roles["reward"], training, center)
    return trainings


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """Makes the supervised trainings of a run."""

    config: Config
    tokenizer: Tokenizer
    validator: Validator | None
    run_dir: Path

    def sft(
        self, name: str, prefix: str, role: Role, training: SupervisedConfig
    ) -> SupervisedTraining:
        """SFT of a language model; measured by its answers, where there are any."""
        plan = plan_supervised(self.config, training, role, build_offline(SFT()), prefix=prefix)
        rows = records_held(plan)
        loader = sft_batches(self.config, training, self.tokenizer, self.run_dir, rows)
        evaluations: list[Evaluation] = []
        if self.validator is not None:
            accuracy = f"{prefix}/eval_accuracy"
            evaluations.append(
                AnswerEvaluation(validator=self.validator.of(role), accuracy_name=accuracy)
            )
        return self._checked(name, plan, training, loader, evaluations)

    def reward_model(
        self, role: Role, training: SupervisedConfig, center: float
    ) -> SupervisedTraining:
        """Training of the reward model on preference pairs."""
        algorithm = build_offline(PairwiseRewardModel(center=center))
        plan = plan_supervised(self.config, training, role, algorithm, prefix="reward_model")
        rows = records_held(plan)
        loader, held_out = preference_data(
            self.config, training, self.tokenizer, self.run_dir, rows
        )
        evaluations: list[Evaluation] = []
        if held_out and plan.held_out is not None:
            evaluation = RecordEvaluation(
                plan.held_out,
                partial(means, algorithm),
                held_out,
                role.mesh,
                rows,
                prefix="reward_model/eval_",
            )
            evaluations.append(evaluation)
        return self._checked("reward_model", plan, training, loader, evaluations)

    def _checked(
        self,
        name: str,
        plan: Plan,
        training: SupervisedConfig,
        loader: Loader[Any, Any],
        evaluations: list[Evaluation],
    ) -> SupervisedTraining:
        if training.stop_at and not evaluations:
            raise ConfigError(
                f"{name}.stop_at={training.stop_at}: nothing measures that accuracy; give "
                "validation data, config.data.val_files or config.data.val_tasks, or set stop_at=0"
            )
        return SupervisedTraining(
            name=name, plan=plan, settings=training, loader=loader, evaluations=evaluations
        )


# ------------------------------------------------------------------------- checkpoints


def run_identity(plan: Plan, tokenizer: Tokenizer) -> Identity:
    """Which model and data a checkpoint of this run belongs to. A resume compares it."""
    devices = plan.learner.mesh.devices
    setting = {
        **package_versions(),
        "device": f"{devices.size} x {devices.flat[0].device_kind}",
        "processes": str(jax.process_count()),
        "mesh": _sizes(plan.learner),
    }
    for name, role in plan.roles.items():
        setting |= {f"{name}.{key}": value for key, value in _how(role).items()}
    return {
        MODELS: {
            name: model_record(role.spec, role.forward.dtype) for name, role in plan.roles.items()
        },
        TOKENIZER: tokenizer.digest(),
        LEARNER: plan.learner.name,
        SETTING: setting,
    }


def _sizes(role: Role) -> str:
    sizes = [f"{axis}={size}" for axis, size in role.mesh.shape.items() if size > 1]
    return " ".join(sizes) or "one device"


def _how(role: Role) -> dict[str, str]:
    """Settings of a role that change its results by rounding only."""
    forward = role.forward
    return {
        "attention": forward.attention,
        "remat": forward.remat,
        "scan_layers": str(forward.scan_layers).lower(),
        "residual_dtype": forward.residual_dtype,
        "head_dtype": "float32" if role.spec.float32_head else forward.dtype,
    }


def to_items(states: States, left_out: list[str]) -> dict[str, Any]:
    """States as checkpoint items: parameters apart from optimizers, so an export reads one item."""
    items: dict[str, Any] = {}
    for name, state in states.items():
        if name in left_out:
            continue
        if isinstance(state, TrainState):
            items[name] = state.params
            items[name + OPTIMIZER] = {"opt_state": state.opt_state, "step": state.step}
        else:  # bare parameters, of a reference that follows the policy; or no dict
            items[name] = state if isinstance(state, dict) else {STATE: state}
    return items


def from_items(items: dict[str, Any], frozen: dict[str, Params]) -> States:
    """The inverse of `to_items`."""
    states: States = dict(frozen)
    for name, item in items.items():
        if name.endswith(OPTIMIZER):
            continue
        optimizer = items.get(name + OPTIMIZER)
        if optimizer is not None:
            states[name] = TrainState(params=item, **optimizer)
        else:
            states[name] = item[STATE] if item.keys() == {STATE} else item
    return states


# ------------------------------------------------------------------------- bases


def bases_record(plan: Plan, states: States) -> dict[str, Record]:
    """A record of each base that a resume reads again. Every process must call it."""
    return {
        name: record_of_base(plan.bases[name], source, _seed(plan, name), states[name])
        for name, source in plan.reloaded.items()
    }


def read_bases(plan: Plan, saved: dict[str, Any]) -> States:
    """The bases of a resumed run. Raises: ConfigError if one has changed."""
    if saved.keys() != plan.reloaded.keys():
        raise ConfigError(
            f"the checkpoint names the frozen weights {sorted(saved) or 'of its own folder'}, and "
            f"this config {sorted(plan.reloaded) or 'those after a warm-up'}; give the warm-up and "
            "the adapters that the run began with"
        )
    return {
        name: read_base(plan.bases[name], saved[name], source)
        for name, source in plan.reloaded.items()
    }


def _seed(plan: Plan, name: str) -> int:
    return seed_of_base(plan.config, name, plan.learner.name)
