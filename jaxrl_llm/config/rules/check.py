"""The check of a config by all rules in their order, and the rules of no other file."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from jaxrl_llm.config.algorithms import GDPO, Shared
from jaxrl_llm.config.graders import Code, Judge, MathAnswer, Remote
from jaxrl_llm.config.rules import NO_KEY, Faults, fault_of, paths, sizes
from jaxrl_llm.config.rules.conflicts import conflicts
from jaxrl_llm.config.schema import (
    AdaptedSettings,
    Config,
    CriticConfig,
    ModelSettings,
    OptimizerConfig,
    is_offline,
)
from jaxrl_llm.config.thresholds import parse_rules
from jaxrl_llm.typed_records.bounds import UpTo
from jaxrl_llm.typed_records.messages import ConfigError
from jaxrl_llm.typed_records.record import Custom, Record, fields_of
from jaxrl_llm.typed_records.tree import as_text, every, is_empty, value_at

__all__ = ["OF_THIS_MACHINE", "RULES", "check", "faults"]


def check(config: Config) -> None:
    """Raise ConfigError for the first thing in `config` that cannot work."""
    for fault in faults(config, RULES):
        raise ConfigError(fault)


def faults(config: Config, rules: Sequence[Callable[[Config], Faults]]) -> Iterator[str]:
    """What some rules say of a config, with keys and values as on a command line."""
    for rule in rules:
        for fault in rule(config):
            named = re.sub(r"<([\w.-]+)>", partial(_named, config), fault)
            yield named.replace(NO_KEY, "<")


def _named(config: Config, key: re.Match[str]) -> str:
    """A key with its value, as on a command line."""
    value = value_at(config, key[1])
    text = as_text(value)
    return f"config.{key[1]}" + ("" if is_empty(value) or "…" in text else f"={text}")


def data(c: Config) -> Faults:
    """There are prompts, a model and a tokenizer."""
    if not (c.data.train_files or c.data.train_tasks or c.data.train_rows or c.data.dataset_class):
        yield "<data>: it has no training data; set --config.data.train_files=[FILE]"
    if not c.actor.path and not c.actor.hf_config:
        yield "<actor>: it has no model; set --config.actor.path=HF_DIR, or hf_config in the file"
    if not c.data.tokenizer and not c.actor.path:
        why = "it is empty, and no config.actor.path has a tokenizer"
        yield f"<data.tokenizer>: {why}; --config.data.tokenizer=char works"


def steps(c: Config) -> Faults:
    """Phases are online, and leave steps for the algorithm."""
    for i, phase in enumerate(c.phases):
        if is_offline(c) or phase.algorithm.offline:
            why = "phases are of online algorithms, and an offline one is here"
            yield f"<phases.{i}>: {why}; run it alone and give its checkpoint as config.actor.path"
    total = sum(phase.steps for phase in c.phases)
    if c.phases and total >= c.total_steps:
        yield f"<phases>: they take {total} of <total_steps> and leave none for config.algorithm"


def rewards(c: Config) -> Faults:
    """An online run has a reward, its parts fit, and graders end before their call does."""
    models: dict[str, Any] = {"teacher": c.teacher}
    parts = len(c.reward.functions)
    if not is_offline(c):
        models["reward.model"] = c.reward.model
        gives = c.rollout.environment or isinstance(c.rollout.program, Custom)
        if not parts and c.reward.model is None and not gives:
            works = "--config.reward.functions=[my_file.py:my_function]"
            yield f"<reward>: it has neither functions nor a model; set {works}"
        weights = {"reward.weights": c.reward.weights}
        for key, algorithm in every(c, GDPO):
            weights[f"{key}.reward_weights"] = algorithm.reward_weights
            if not parts:
                why = "it standardises the reward functions one by one, and there is none"
                yield f"<{key}>: {why}; set --config.reward.functions=[exact_answer]"
        for key, each in weights.items():
            if each and len(each) != parts:
                yield f"<{key}>: {len(each)} weights for {parts} functions of reward.functions"
    for key, model in models.items():
        if model is not None and not model.path and model.training is None:
            works = f"--config.{key}.path=DIR, or --config.{key}.training={{}}"
            yield f"<{key}>: it has no path and no training; set {works} to train it in the run"
    sources = [grader.source for grader in c.validation.graders]
    for source in {*sources}:
        if sources.count(source) > 1:
            yield f"<validation.graders>: the source {source!r} has two graders; give it one"
    limits = {Code: "total_s", Judge: "total_s", Remote: "total_s", MathAnswer: "seconds"}
    for kind, name in limits.items():
        for key, grader in every(c, kind):
            seconds = getattr(grader, name)
            if seconds >= c.reward.timeout_s:
                why = "it does not end before <reward.timeout_s>, so slow work counts as a failure"
                yield f"<{key}.{name}>: {why}: --config.reward.timeout_s={seconds + 5:g} works"


def bounds(c: Config) -> Faults:
    """No key is above another one of its record that bounds it."""
    for key, record in every(c, Record):
        for name, bound in bounds_by_keys(type(record)):
            value, most = getattr(record, name), getattr(record, bound.key)
            if value > most or value == most and not bound.itself:
                word = "above" if bound.itself else "not below"
                yield f"<{key}.{name}>: it is {word} <{key}.{bound.key}>"


def bounds_by_keys(cls: type[Record]) -> list[tuple[str, UpTo]]:
    """The fields of a record that another one bounds."""
    fields = fields_of(cls).items()
    return [(n, bound) for n, f in fields for bound in f.metadata if isinstance(bound, UpTo)]


def optimizers(c: Config) -> Faults:
    """A schedule has steps after its warm-up."""
    for key, o in every(c, OptimizerConfig):
        if o.schedule != "constant" and 0 < o.total_steps <= o.warmup_steps:
            why = f"the warm-up of <{key}.warmup_steps> leaves no step for <{key}.schedule>"
            yield f"<{key}.total_steps>: {why}"


def correction(c: Config) -> Faults:
    """The rules of the rollout correction have thresholds, also where nothing uses them."""
    for key, s in every(c, Shared):
        if s.rollout_rs is not None or s.rollout_rs_threshold is not None:
            if fault := fault_of(partial(parse_rules, s.rollout_rs), s.rollout_rs_threshold):
                yield f"<{key}.rollout_rs_threshold>: {fault}"


def models(c: Config) -> Faults:
    """Each model: its name, weights, adapters and sizes."""
    names = [model.name for model in c.models]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield f"<models.{i}.name>: another model has that name"
    for key, model in every(c, ModelSettings):
        parts = [name for name in ("training", "update") if getattr(model, name, None)]
        training = "".join(f"{name}." for name in parts)
        adapted = isinstance(model, AdaptedSettings)
        if (training or adapted) and model.param_dtype != "float32":
            yield (
                f"<{key}.param_dtype>: updates smaller than half a bfloat16 step would be lost, so "
                f"weights that learn are float32; config.{key}.dtype=bfloat16 computes in it, and "
                f"config.{key}.{training}optimizer.moment_dtype=bfloat16 saves memory"
            )
        if adapted and model.lora.enabled and not model.lora.targets:
            yield f"<{key}.lora.targets>: it is empty, so nothing would learn"
        if isinstance(model, CriticConfig):
            yield from _shared_weights(c, model)


def _shared_weights(c: Config, critic: CriticConfig) -> Faults:
    """The critic's adapters take the actor's frozen weights as they are."""
    actor = c.actor
    if critic.path or critic.hf_config or not (critic.lora.enabled and actor.lora.enabled):
        return
    dtype, shares = actor.base_dtype or actor.dtype, "the critic shares the actor's frozen weights"
    if (critic.base_dtype or critic.dtype) != dtype:
        yield f"<critic.base_dtype>: {shares}, which are {dtype}; give both the same"
    if critic.tensor != actor.tensor:
        yield f"<critic.tensor>: {shares}, which are split by <actor.tensor>; give both the same"


RULES: tuple[Callable[[Config], Faults], ...] = (
    conflicts, sizes.placement, sizes.batches, sizes.lengths,
    rewards, bounds, optimizers, correction, sizes.phases_of_mesh, steps, data, models,
    paths.rows, sizes.trainings, paths.folders, paths.functions, paths.server,
    paths.trackers,
)  # fmt: skip
# Rules about files, folders and packages. They may hold on another machine.
OF_THIS_MACHINE = (
    paths.rows, paths.folders, paths.functions, paths.server, paths.trackers,
)  # fmt: skip
