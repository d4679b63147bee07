"""Settings that do not work together: a table of pairs, each with the reason.

A setting that needs another one does not work without it, and is a row as well. The message and
its remedies are made from the row. tests/config/test_conflicts.py shows each row at work.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxrl_llm.config.messages import Faults
from jaxrl_llm.config.placement import ROLLOUT, devices_of_roles
from jaxrl_llm.config.schema import (
    AUTO,
    AXES,
    ActorConfig,
    AdaptedSettings,
    Config,
    CriticConfig,
    ExtraModelConfig,
    ModelSettings,
    SupervisedConfig,
    is_offline,
)
from jaxrl_llm.config.tasks import Spread
from jaxrl_llm.config.tree import as_text, every, is_empty, value_at


class Setting(NamedTuple):
    """What a config may say at a key: any value but `otherwise`, or `value` alone."""

    key: str
    otherwise: str  # a value that ends the conflict, as text; nothing where that is another run
    value: str = ""
    only: Callable[[Config], object] = lambda _: True  # where it counts

    def holds(self, config: Config) -> bool:
        """Whether the config says it."""
        text = as_text(value_at(config, self.key))
        said = text == self.value if self.value else text != self.otherwise
        return said and bool(self.only(config))


class Conflict(NamedTuple):
    """Two settings that do not work together."""

    one: Setting
    other: Setting
    why: str

    def fault(self, config: Config) -> str:
        """The sentence for a config in which both hold; rules.py says what <KEY> is."""
        word = "without" if is_empty(value_at(config, self.other.key)) else "with"
        ends = (each for each in (self.one, self.other) if each.otherwise)
        works = (f"--config.{each.key}={each.otherwise}" for each in ends)
        return (
            f"<{self.one.key}> does not work {word} <{self.other.key}>: {self.why}; "
            f"{' or '.join(works)} works"
        )


def conflicts(config: Config) -> Faults:
    """A sentence for each pair that the config has."""
    for pair in pairs_of(config):
        if pair.one.holds(config) and pair.other.holds(config):
            yield pair.fault(config)


def pairs_of(config: Config) -> list[Conflict]:
    """The pairs of the run, and those of each of its models."""
    models = every(config, ModelSettings)
    return [*OF_THE_RUN, *(pair for key, model in models for pair in _of_model(key, model))]


def _online(c: Config) -> bool:
    return not is_offline(c)


def _on_one_group(c: Config) -> bool:
    """Whether generation shares its devices with what learns."""
    return c.placement != AUTO and ROLLOUT not in devices_of_roles(c)


def _no_records(c: Config) -> bool:
    """Whether nothing learns from records."""
    return not is_offline(c) and not any(every(c, SupervisedConfig))


# ------------------------------------------------------------------------- settings of the run

OFFLINE = Setting("algorithm", "", only=is_offline)
NO_RECORDS = Setting("algorithm", "", only=_no_records)
ONE_SAMPLE = Setting("rollout.n", "8", value="1", only=_online)
PRIORITY = Setting("data.priority", "null")
SPREAD = PRIORITY._replace(only=lambda c: isinstance(c.data.priority, Spread))
IN_ORDER = Setting("data.shuffle", "true")
CURRICULUM = Setting("data.curriculum", "''")
NO_CURRICULUM = Setting("data.curriculum", "difficulty", value="''")
CURRICULUM_STEPS = Setting("data.curriculum_steps", "0")
STREAMING = Setting("data.streaming", "false")
READERS = Setting("data.num_workers", "0")
AHEAD = Setting("max_staleness", "0")
AHEAD_ON_ONE_GROUP = AHEAD._replace(only=_on_one_group)
NOT_AHEAD = Setting("max_staleness", "1", value="0")
PARTIAL = Setting("partial_rollouts", "0")
FILTERED = Setting("rollout.filter_groups.enable", "false")
FLOAT8 = Setting("rollout.quantization", "none")
OTHER_DTYPE = Setting("rollout.dtype", "''", only=lambda c: c.rollout.dtype != c.actor.dtype)
PLACED = Setting("placement", "colocated", only=lambda c: c.placement)
ROLES_APART = PLACED._replace(only=lambda c: c.placement not in ({}, AUTO))
AUTOMATIC = Setting("placement", "colocated", value=AUTO)
NODE_GROUPS = Setting("node_groups", "{}")
SEQUENCE = Setting("mesh.sequence", "1")
PIPELINE = Setting("mesh.pipeline", "1")
NO_PIPELINE = Setting("mesh.pipeline", "2", value="1")
ROUNDS = Setting("mesh.pipeline_rounds", "1")
MICRO_BATCHES = Setting("mesh.pipeline_micro_batches", "1")
MESH = tuple(Setting(f"mesh.{axis}", "1") for axis in AXES)
STEPS_SCORED = Setting("reward.process_rewards", "false")
NO_FUNCTIONS = Setting("reward.functions", "[my_rewards.py:my_function]", value="[]", only=_online)
TEACHER = Setting("teacher", "null")
NO_STUDENT = OFFLINE._replace(otherwise="distillation")
EXACT = Setting("exact", "off")
STRICT = Setting("exact", "repeatable", value="strict")


# ------------------------------------------------------------------------- pairs of the run

_WAITS = (
    "each round of generation waits for the rewards of the one before, so on one group of devices "
    "nothing would overlap (--config.placement.rollout=4-7 gives generation its own)"
)
_NEWER = "a response goes on under a newer policy only where batches are generated ahead"
_SORTED = "it is for online runs, and an offline one takes a sorted file with data.shuffle=false"
_TOKENISED = "prompts are tokenised before the first step, so processes have nothing to do"
_BITS = "bits of sampler and trainer are not known to be equal"

OF_THE_RUN: tuple[Conflict, ...] = (
    # The order of prompts.
    Conflict(PRIORITY, OFFLINE, "an offline run scores no answers"),
    Conflict(PRIORITY, IN_ORDER, "prompts are drawn at random"),
    Conflict(SPREAD, ONE_SAMPLE, "it reads the std of a prompt's samples"),
    Conflict(CURRICULUM, PRIORITY, "they each give the order of prompts"),
    Conflict(CURRICULUM, OFFLINE, _SORTED),
    Conflict(CURRICULUM, STREAMING, "it reads the column of all rows before the first step"),
    Conflict(CURRICULUM_STEPS, NO_CURRICULUM, "they are batches that a column orders"),
    Conflict(READERS, NO_RECORDS, _TOKENISED),
    # Generation.
    Conflict(FILTERED, ONE_SAMPLE, "a group of one sample never varies"),
    Conflict(AHEAD, OFFLINE, "offline training generates nothing ahead"),
    Conflict(AHEAD_ON_ONE_GROUP, FILTERED, _WAITS),
    Conflict(PARTIAL, FILTERED, "a round of generation ends before its groups can be compared"),
    Conflict(PARTIAL, NOT_AHEAD, _NEWER),
    # Devices.
    Conflict(ROLES_APART, OFFLINE, "offline training has one group of devices"),
    Conflict(AUTOMATIC, NODE_GROUPS, "auto chooses the devices of every role"),
    Conflict(ROUNDS, NO_PIPELINE, "one stage is no pipeline"),
    Conflict(MICRO_BATCHES, NO_PIPELINE, "one stage is no pipeline"),
    # Rewards and teachers.
    Conflict(STEPS_SCORED, NO_FUNCTIONS, "there is no function that could score steps"),
    Conflict(TEACHER, NO_STUDENT, "an offline run does not read it"),
    # Bits.
    Conflict(STRICT, OFFLINE, "it is of the sampler's log-probs, and offline nothing is sampled"),
    *(Conflict(each, STRICT, _BITS) for each in (OTHER_DTYPE, FLOAT8, PLACED, PARTIAL, *MESH)),
)


# ------------------------------------------------------------------------- pairs of a model


def _of_model(key: str, model: ModelSettings) -> Iterator[Conflict]:
    """The pairs of the model at a key."""
    sized = "critic" if key == "critic" else "actor"
    packed = Setting(f"{sized}.micro_batch_tokens", "0")
    cudnn = Setting(f"{key}.attention", "auto", value="cudnn")
    yield Conflict(cudnn, EXACT, "its gradient adds up in no fixed order")
    yield Conflict(cudnn, packed, "it takes a sample a row, and this packs several")
    yield Conflict(cudnn, SEQUENCE, "it takes whole rows, and this splits them")
    if key in ("actor", "teacher"):
        yield Conflict(Setting(f"{key}.residual_dtype", "float32"), STRICT, _BITS)
        yield Conflict(Setting(f"{key}.scan_layers", "false"), STRICT, _BITS)
    if isinstance(model, ActorConfig | CriticConfig):
        learns = _online if key == "critic" else lambda _: True
        size = Setting(f"{key}.micro_batch_size", "0", only=learns)
        yield Conflict(packed, size, "each of them sizes a pass")
    if isinstance(model, ExtraModelConfig):
        why = f"{model.name} is a language model, which gives no score"
        kind = Setting(f"{key}.kind", "scalar", only=_online)
        yield Conflict(Setting(f"{key}.weight", "0"), kind, why)
    if isinstance(model, AdaptedSettings):
        yield from _of_adapters(key, model)
    if isinstance(model, ActorConfig):
        yield from _of_routers(model)


def _of_adapters(key: str, model: AdaptedSettings) -> Iterator[Conflict]:
    def enabled(_: Config) -> bool:
        return model.lora.enabled

    adapted = Setting(f"{key}.lora", "{}", only=enabled)
    apart = Setting(f"{key}.lora.merge", "true", only=enabled)
    dora = Setting(f"{key}.lora.dora", "false", only=enabled)
    dropout = Setting(f"{key}.lora.dropout", "0", only=enabled)
    yield Conflict(
        Setting(f"{key}.base_dtype", "''"),
        Setting(f"{key}.lora.rank", "16", value="0", only=lambda _: not model.lora.enabled),
        "it is of frozen weights, and all weights learn",
    )
    yield Conflict(dropout, dora, "the two together are not implemented")
    yield Conflict(adapted, PIPELINE, "adapters in stages of layers are not implemented")
    for place in (PLACED, NODE_GROUPS):
        yield Conflict(adapted, place, "roles share the frozen weights on the actor's devices")
    for each in (apart, dora, dropout):
        yield Conflict(each, STRICT, "merged adapters alone have the same bits in the sampler")
    if key == "actor":
        yield Conflict(apart, dora, "the norms of DoRA are of merged weights")
        yield Conflict(apart, FLOAT8, "merged weights alone are quantized")


def _of_routers(actor: ActorConfig) -> Iterator[Conflict]:
    adapted = Setting("actor.lora", "{}", only=lambda _: actor.lora.enabled)
    for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_rate"):
        why = "routers are frozen weights and cannot learn"
        yield Conflict(Setting(f"actor.{name}", "0"), adapted, why)
    yield Conflict(
        Setting("actor.router_aux_loss_by_layer", "false"),
        Setting("actor.router_aux_loss_coef", "0.01", value="0"),
        "there is no such loss",
    )
