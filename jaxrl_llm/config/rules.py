"""Rules that span fields of a config, checked without jax in milliseconds.

Bounds of one field stand on the field. A rule yields sentences: why a value cannot work, and one
that does. In them <KEY> stands for config.KEY=VALUE. Rules of sizes are in size_rules.py.
"""

import functools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxrl_llm.config.algorithms import GDPO, Shared
from jaxrl_llm.config.bounds import UpTo
from jaxrl_llm.config.conflicts import conflicts
from jaxrl_llm.config.graders import Code, Judge, MathAnswer, Remote
from jaxrl_llm.config.messages import NO_KEY, ConfigError, Faults, fault_of, number_text
from jaxrl_llm.config.paths import folders, functions, rows, trackers
from jaxrl_llm.config.records import Record, fields_of
from jaxrl_llm.config.schema import (
    AdaptedSettings,
    Config,
    ModelSettings,
    OptimizerConfig,
    is_offline,
    learns_offline,
)
from jaxrl_llm.config.size_rules import (
    batches,
    counts,
    lengths,
    phases_of_mesh,
    placement,
    splits,
    trainings,
)
from jaxrl_llm.config.thresholds import parse_rules
from jaxrl_llm.config.tree import as_text, every, is_empty, value_at

__all__ = ["check"]


def check(config: Config) -> None:
    """Raise ConfigError for the first thing in `config` that cannot work."""
    for rule in RULES:
        for fault in rule(config):
            named = re.sub(r"<([\w.-]+)>", partial(_named, config), fault)
            raise ConfigError(named.replace(NO_KEY, "<"))


def _named(config: Config, key: re.Match[str]) -> str:
    """A key with its value, as on a command line."""
    value = value_at(config, key[1])
    text = as_text(value)
    return f"config.{key[1]}" + ("" if is_empty(value) or "…" in text else f"={text}")


# ------------------------------------------------------------------------- data and run


def data(c: Config) -> Faults:
    """There are prompts, a model and a tokenizer."""
    if not (c.data.train_files or c.data.train_tasks or c.data.train_rows or c.data.dataset_class):
        yield (
            "<data>: it has no training data; set --config.data.train_files=[FILE] or "
            "--config.data.train_tasks=[chain_sum]"
        )
    if not c.actor.path and not c.actor.hf_config:
        yield "<actor>: it has no model; set --config.actor.path=HF_DIR, or hf_config in the file"
    if not c.data.tokenizer and not c.actor.path:
        yield (
            "<data.tokenizer>: it is empty, and config.actor.path, whose tokenizer would be taken, "
            "too; --config.data.tokenizer=char works"
        )


def phases(c: Config) -> Faults:
    """Phases are online, and leave steps for the algorithm."""
    for i, phase in enumerate(c.phases):
        if is_offline(c) or learns_offline(phase.algorithm):
            yield (
                f"<phases.{i}>: phases are of online algorithms, and an offline one is here; run "
                "it alone and give its checkpoint as --config.actor.path"
            )
    total = sum(phase.steps for phase in c.phases)
    if c.phases and total >= c.total_steps:
        yield (
            f"<phases>: they take {total} steps of <total_steps> and leave none for "
            f"config.algorithm; --config.total_steps={total + 1} works"
        )


def run(c: Config) -> Faults:
    """Traced steps are steps of the run."""
    if any(step > c.total_steps for step in c.profile.steps):
        works = f"[{min(3, c.total_steps)}]" if c.total_steps else "[]"
        yield (
            "<profile.steps>: <total_steps> is the last step, and none is traced after it; "
            f"config.profile.steps={works} works"
        )


# ------------------------------------------------------------------------- functions


def rewards(c: Config) -> Faults:
    """An online run has a reward, its parts fit, and graders end before their call does."""
    reward, write = c.reward, "set --config.reward.functions=[my_rewards.py:my_function]"
    if not is_offline(c):
        if not reward.functions and reward.model is None:
            yield f"<reward>: it has neither functions nor a model; {write}"
        yield from _parts(c)
        yield from _origin("reward.model", reward.model)
    yield from _origin("teacher", c.teacher)
    limits = {Code: "total_s", Judge: "total_s", Remote: "total_s", MathAnswer: "seconds"}
    for kind, name in limits.items():
        for key, grader in every(c, kind):
            seconds = getattr(grader, name)
            if seconds >= reward.timeout_s:
                yield (
                    f"<{key}.{name}>: it does not end before <reward.timeout_s>, so slow work "
                    f"counts as a failed call: --config.reward.timeout_s={seconds + 5:g} works"
                )


def _parts(c: Config) -> Faults:
    """There is a weight for each reward function, and a function for GDPO."""
    weights, parts = {"reward.weights": c.reward.weights}, len(c.reward.functions)
    for key, algorithm in every(c, GDPO):
        weights[f"{key}.reward_weights"] = algorithm.reward_weights
        if not parts:
            yield (
                f"<{key}>: it standardises the reward functions one by one, and there is none; set "
                "--config.reward.functions=[exact_answer]"
            )
    for key, given in weights.items():
        if given and len(given) != parts:
            ones = ",".join(["1"] * parts)
            yield (
                f"<{key}>: {len(given)} weights for {parts} functions of config.reward.functions; "
                f"[{ones}] works"
            )


def bounds(c: Config) -> Faults:
    """No key is above another one of its record that bounds it."""
    for key, record in every(c, Record):
        for name, bound in bounds_by_keys(type(record)):
            value, most = getattr(record, name), getattr(record, bound.key)
            if value > most or value == most and not bound.itself:
                word, works = ("above", most) if bound.itself else ("not below", most - 1)
                fits = f"{number_text(works)} works"
                yield f"<{key}.{name}>: it is {word} <{key}.{bound.key}>; {fits}"


@functools.cache
def bounds_by_keys(cls: type[Record]) -> list[tuple[str, UpTo]]:
    """The fields of a record that another one bounds."""
    fields = fields_of(cls).items()
    return [(n, bound) for n, f in fields for bound in f.metadata if isinstance(bound, UpTo)]


def optimizers(c: Config) -> Faults:
    """A schedule has steps after its warm-up."""
    for key, optimizer in every(c, OptimizerConfig):
        warmup, last = optimizer.warmup_steps, optimizer.total_steps
        if optimizer.schedule != "constant" and 0 < last <= warmup:
            yield (
                f"<{key}.total_steps>: the warm-up of <{key}.warmup_steps> leaves no step for "
                f"<{key}.schedule>; {warmup + 1} works, 0 takes the run's number"
            )


def correction(c: Config) -> Faults:
    """The rules of the rollout correction have thresholds, also where nothing uses them."""
    for key, s in every(c, Shared):
        if s.rollout_rs is not None or s.rollout_rs_threshold is not None:
            if fault := fault_of(partial(parse_rules, s.rollout_rs), s.rollout_rs_threshold):
                yield f"<{key}.rollout_rs_threshold>: {fault}"


def _origin(key: str, model: Any) -> Faults:
    if model is not None and not model.path and model.training is None:
        yield (
            f"<{key}>: it has no path and no training; set --config.{key}.path=DIR, or "
            f"--config.{key}.training={{}} to train it in the run"
        )


# ------------------------------------------------------------------------- models


def models(c: Config) -> Faults:
    """Each model: its name, weights, adapters and sizes."""
    names = [model.name for model in c.models]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield f"<models.{i}.name>: another model has that name; {name}_{i} works"
    for key, model in every(c, ModelSettings):
        yield from _weights(key, model)
        yield from splits(c, key, model)
        if isinstance(model, AdaptedSettings):
            yield from _lora(c, key, model)


def _weights(key: str, model: ModelSettings) -> Faults:
    training = "training." if getattr(model, "training", None) else ""
    learns = training or isinstance(model, AdaptedSettings)
    if learns and model.param_dtype != "float32":
        yield (
            f"<{key}.param_dtype>: updates smaller than half a bfloat16 step would be lost, so "
            f"weights that learn are float32; config.{key}.dtype=bfloat16 computes in it, and "
            f"config.{key}.{training}optimizer.moment_dtype=bfloat16 or .offload=true saves memory"
        )


def _lora(c: Config, key: str, model: AdaptedSettings) -> Faults:
    """Adapters have a folder and targets, and share the actor's frozen weights as they are."""
    lora, base = model.lora, f"{key}.base_dtype"
    if not lora.enabled:
        return
    if not lora.targets:
        yield f"<{key}.lora.targets>: it is empty; all-linear is usual"
    actor = c.actor
    if key == "critic" and actor.lora.enabled and not model.path and not model.hf_config:
        dtype = actor.base_dtype or actor.dtype
        if (model.base_dtype or model.dtype) != dtype:
            yield (
                f"<{base}>: the critic shares the actor's frozen weights, which are {dtype}; "
                f"--config.{base}={dtype} works"
            )
        if model.tensor != actor.tensor:
            yield (
                "<critic.tensor>: the critic shares the actor's frozen weights, which are split by "
                "<actor.tensor>; give both the same"
            )


RULES: tuple[Callable[[Config], Faults], ...] = (
    counts, conflicts, placement, batches, lengths, rewards, bounds, optimizers, correction,
    phases_of_mesh, trainings, phases, data, models, run,
    rows, folders, functions, trackers,
)  # fmt: skip
