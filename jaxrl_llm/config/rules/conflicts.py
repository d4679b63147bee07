"""Settings that do not work together: a table of pairs, each with the reason.

A setting that needs another one does not work without it, and is a row as well. The message is made
from the row. tests/config/test_conflicts.py shows each row at work.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxrl_llm.config.placement import ROLLOUT, devices_of_roles
from jaxrl_llm.config.rules import Faults
from jaxrl_llm.config.schema import (
    AUTO,
    AXES,
    Config,
    ExtraModelConfig,
    ModelSettings,
    SupervisedConfig,
    is_offline,
)
from jaxrl_llm.config.tasks import Spread
from jaxrl_llm.typed_records.tree import default_at, every, is_empty, value_at


class Setting(NamedTuple):
    """A value at a key: any but the default, or values for which `when` holds."""

    key: str
    when: Callable[[Config], object] | None = None

    def holds(self, config: Config) -> bool:
        if self.when is not None:
            return bool(self.when(config))
        return value_at(config, self.key) not in (None, default_at(config, self.key))


class Conflict(NamedTuple):
    """Two settings that do not work together."""

    one: Setting
    other: Setting
    why: str

    def fault(self, config: Config) -> str:
        """The sentence for a config in which both hold; rules/__init__.py says what <KEY> is."""
        word = "without" if is_empty(value_at(config, self.other.key)) else "with"
        return f"<{self.one.key}> does not work {word} <{self.other.key}>: {self.why}"


Row = tuple[Setting | str, Setting | str, str]  # a text is a key with any value but its default


def conflicts(config: Config) -> Faults:
    """A sentence for each pair that the config has."""
    for pair in pairs_of(config):
        if pair.one.holds(config) and pair.other.holds(config):
            yield pair.fault(config)


def pairs_of(config: Config) -> list[Conflict]:
    """The pairs of the run and of each of its models."""

    def setting(each: Setting | str) -> Setting:
        return Setting(each) if isinstance(each, str) else each

    models = every(config, ModelSettings)
    rows = [*OF_THE_RUN, *(row for key, model in models for row in _of_a_model(key, model))]
    return [Conflict(setting(one), setting(other), why) for one, other, why in rows]


def _ahead_on_one_group(c: Config) -> bool:
    """True if batches are generated ahead on the devices of what learns."""
    return bool(c.max_staleness) and c.placement != AUTO and ROLLOUT not in devices_of_roles(c)


def _no_records(c: Config) -> bool:
    """True if nothing learns from records."""
    return not is_offline(c) and not any(every(c, SupervisedConfig))


def _online(key: str) -> Setting:
    """Any value but the default, in a run that reads it."""
    return Setting(key, lambda c: not is_offline(c) and value_at(c, key) != default_at(c, key))


OFFLINE = Setting("algorithm", is_offline)
ONLINE = Setting("algorithm", lambda c: not is_offline(c))
NO_RECORDS = Setting("algorithm", _no_records)
ONE_SAMPLE = Setting("rollout.n", lambda c: c.rollout.n == 1 and not is_offline(c))
SPREAD = Setting("data.priority", lambda c: isinstance(c.data.priority, Spread))
MASKED = Setting("reward.on_failure", lambda c: c.reward.on_failure == "mask")
NO_CURRICULUM = Setting("data.curriculum", lambda c: not c.data.curriculum)
AHEAD_ON_ONE_GROUP = Setting("max_staleness", _ahead_on_one_group)
NOT_AHEAD = Setting("max_staleness", lambda c: not c.max_staleness)
OTHER_DTYPE = Setting("rollout.dtype", lambda c: c.rollout.dtype not in ("", c.actor.dtype))
OTHERS_APART = Setting(
    "placement", lambda c: c.placement != AUTO and bool({*c.placement} - {"actor", "reference"})
)
ROLES_APART = Setting("placement", lambda c: c.placement not in ({}, AUTO))
AUTOMATIC = Setting("placement", lambda c: c.placement == AUTO)
NO_PIPELINE = Setting("mesh.pipeline", lambda c: c.mesh.pipeline == 1)
NO_FUNCTIONS = Setting(
    "reward.functions",
    lambda c: not (c.reward.functions or c.rollout.environment or is_offline(c)),
)
NO_ROUTER_LOSS = Setting("actor.router_aux_loss_coef", lambda c: not c.actor.router_aux_loss_coef)
EXACT = Setting("exact", lambda c: c.exact != "off")
ADAPTED = Setting("actor.lora", lambda c: c.actor.lora.enabled)
STRICT = Setting("exact", lambda c: c.exact == "strict")
IMAGES = Setting("data.max_images", lambda c: c.data.max_images)
TEXT_ALONE = Setting("data.max_images", lambda c: not c.data.max_images)
FORKS = Setting("rollout.earlier_thinking", lambda c: c.rollout.earlier_thinking == "fork")
ONE_ROW = Setting("rollout.max_rows", lambda c: c.rollout.max_rows == 1)
OTHER_BITS = ("rollout.quantization", "partial_rollouts", *(f"mesh.{axis}" for axis in AXES))


_WAITS = (
    "each round of generation waits for the rewards of the one before, so on one group of devices "
    "nothing would overlap (--config.placement.rollout=4-7 gives generation its own)"
)
_NEWER = "a response goes on under a newer policy only where batches are generated ahead"
_ROUNDS = "a round of generation ends before its groups can be compared"
_SORTED = "it is for online runs, and an offline one takes a sorted file with data.shuffle=false"
_SIZES = "each of them sizes a pass"
_TOKENISED = "prompts are tokenised before the first step, so processes have nothing to do"
_BY_SESSIONS = ("rollout.tools", "rollout.environment", "rollout.program", "partial_rollouts")
_BITS = "bits of sampler and trainer are not known to be equal"


def _of_role(role: str) -> Iterator[Row]:
    """The pairs of a model that learns."""

    def adapted(c: Config) -> bool:
        return getattr(c, role).lora.enabled

    def setting(name: str, default: object) -> Setting:
        key = f"{role}.lora.{name}"
        return Setting(key, lambda c: adapted(c) and value_at(c, key) != default)

    adapters = Setting(f"{role}.lora", adapted)
    all_learn = Setting(f"{role}.lora.rank", lambda c: not adapted(c))
    apart, dora, dropout = setting("merge", True), setting("dora", False), setting("dropout", 0)
    yield (
        f"{role}.base_dtype",
        all_learn,
        "no weights are frozen, and it is their dtype",
    )
    yield dropout, dora, "the two together are not implemented"
    for each in (apart, dora, dropout):
        yield each, STRICT, "merged adapters alone have the same bits in the sampler"
    if role == "actor":
        yield apart, dora, "DoRA takes the norms of merged weights"
        yield apart, "rollout.quantization", "merged weights alone are quantized"
        for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_rate"):
            yield f"actor.{name}", adapters, "routers are frozen weights and cannot learn"


OF_THE_RUN: tuple[Row, ...] = (
    # Images.
    ("actor.vision.train", TEXT_ALONE, "no image encoder is read"),
    ("actor.vision.train", ADAPTED, "the encoder is a part of the frozen weights"),
    *((IMAGES, each, "sessions of the engine take tokens alone") for each in _BY_SESSIONS),
    # The order of prompts.
    ("data.priority", OFFLINE, "an offline run scores no answers"),
    ("data.priority", "data.shuffle", "prompts are drawn at random"),
    (SPREAD, ONE_SAMPLE, "it reads the std of a prompt's samples"),
    ("data.curriculum", "data.priority", "they each give the order of prompts"),
    ("data.curriculum", OFFLINE, _SORTED),
    ("data.curriculum", "data.streaming", "it reads the column of all rows before the first step"),
    ("data.curriculum_steps", NO_CURRICULUM, "they are batches that a column orders"),
    ("data.num_workers", NO_RECORDS, _TOKENISED),
    # Generation.
    ("rollout.filter_groups.enable", ONE_SAMPLE, "a group of one sample never varies"),
    ("max_staleness", OFFLINE, "offline training generates nothing ahead"),
    (AHEAD_ON_ONE_GROUP, "rollout.filter_groups.enable", _WAITS),
    ("partial_rollouts", "rollout.filter_groups.enable", _ROUNDS),
    ("partial_rollouts", NOT_AHEAD, _NEWER),
    # Devices.
    (OTHERS_APART, OFFLINE, "offline the reference alone may have devices of its own"),
    (AUTOMATIC, "node_groups", "auto chooses the devices of every role"),
    ("mesh.pipeline_rounds", NO_PIPELINE, "one stage is no pipeline"),
    ("mesh.pipeline_micro_batches", NO_PIPELINE, "one stage is no pipeline"),
    # Rewards and teachers.
    ("reward.process_rewards", NO_FUNCTIONS, "there is no function that could score steps"),
    ("reward.failure_value", MASKED, "a failed sample has no score, unless on_failure=value"),
    ("rollout.mask_truncated", OFFLINE, "an offline run generates no responses"),
    ("rollout.tools", OFFLINE, "an offline run generates no responses"),
    ("rollout.environment", OFFLINE, "an offline run generates no responses"),
    ("rollout.program", OFFLINE, "an offline run generates no responses"),
    (FORKS, ONE_ROW, "the rows before the last would not be learned; give as many as turns"),
    ("rollout.program", "rollout.tools", "a program runs its own tools"),
    ("rollout.program", "rollout.environment", "a program is the environment of its samples"),
    ("rollout.program", "rollout.max_tool_calls", "the calls run in the program"),
    ("teacher", OFFLINE, "an offline run does not read it"),
    ("models", OFFLINE, "an offline run does not read them"),
    ("precompute_reference", ONLINE, "answers are not known before the first step"),
    # The reference.
    ("reference.refresh_every", "precompute_reference", "its log-probs would change"),
    ("reference.refresh_every", "reference.path", "a reference that follows begins as the policy"),
    (ROLES_APART, "precompute_reference", "no model is left that could be on other devices"),
    ("reference.refresh_every", ADAPTED, "the reference is the frozen base of the adapters"),
    # Models that learn.
    ("actor.micro_batch_tokens", "actor.micro_batch_size", _SIZES),
    ("critic.micro_batch_tokens", _online("critic.micro_batch_size"), _SIZES),
    *_of_role("actor"),
    *_of_role("critic"),
    ("actor.router_aux_loss_by_layer", NO_ROUTER_LOSS, "there is no such loss"),
    # Bits.
    (STRICT, OFFLINE, "offline nothing is sampled, so there are no log-probs to compare"),
    *((each, STRICT, _BITS) for each in (OTHER_DTYPE, "placement", *OTHER_BITS)),
    *((f"{role}.residual_dtype", STRICT, _BITS) for role in ("actor", "teacher")),
    *((f"{role}.scan_layers", STRICT, _BITS) for role in ("actor", "teacher")),
)


def _of_a_model(key: str, model: ModelSettings) -> Iterator[Row]:
    """The pairs of any model, which is at `key`."""
    cudnn = Setting(f"{key}.attention", lambda _: model.attention == "cudnn")
    packed = f"{'critic' if key == 'critic' else 'actor'}.micro_batch_tokens"
    yield cudnn, EXACT, "its gradient adds up in no fixed order"
    yield cudnn, packed, "it takes a sample a row, and this packs several"
    yield cudnn, "mesh.sequence", "it takes whole rows, and this splits them"
    if isinstance(model, ExtraModelConfig):
        why = f"{model.name} is a language model, which gives no score"
        yield f"{key}.weight", _online(f"{key}.kind"), why
        scalar = Setting(f"{key}.kind", lambda _: model.kind == "scalar")
        yield f"{key}.teacher_weight", scalar, f"{model.name} is a scalar model, and no teacher"
