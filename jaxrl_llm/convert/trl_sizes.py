"""TRL's sizes in ours: what takes several of its keys."""

import math
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.rules import Source, largest_divisor

ONLINE = ("grpo", "rloo")


def samples_a_step(source: Source) -> int:
    """Rows or completions of an optimizer step, over all processes."""
    each = source.count("per_device_train_batch_size")
    return each * source.count("gradient_accumulation_steps") * source.devices


def set_sizes(source: Source, values: dict[str, Any], notes: list[str]) -> int:
    """Batches and passes; the number of TRL's steps that an iteration of ours has."""
    values["mesh.fsdp"] = source.devices
    if source.trainer in ONLINE:
        return _set_groups(source, values, notes)
    if source.trainer == "ppo":
        return _set_ppo(source, values)
    batch = samples_a_step(source)
    values["data.train_batch_size"] = batch
    values["actor.micro_batch_size"] = _pass(source, batch)
    if source.get("packing"):
        values["actor.micro_batch_tokens"] = source.whole("max_seq_length", "max_length")
        values["actor.micro_batch_size"] = 0
    return 1


def _pass(source: Source, samples: int) -> int:
    return largest_divisor(samples // source.devices, source.count("per_device_train_batch_size"))


def _set_groups(source: Source, values: dict[str, Any], notes: list[str]) -> int:
    """Prompts of an iteration and of an optimizer step; TRL counts completions."""
    n, step = source.count("num_generations"), samples_a_step(source)
    generated = _generated(source, step)
    if generated % n:
        raise ConfigError(
            f"{generated} completions a generation are no whole groups of num_generations={n}; "
            f"--devices=N says how many processes there are"
        )
    prompts = generated // n
    mini = largest_divisor(prompts, max(step // n, 1))
    if mini * n != step:
        notes.append(
            f"actor.ppo_mini_batch_size: a mini-batch of ours has whole groups, so the {step} "
            f"completions of an optimizer step became {mini * n}"
        )
    values["data.train_batch_size"] = prompts
    values["actor.ppo_mini_batch_size"] = mini
    values["actor.micro_batch_size"] = _pass(source, mini * n)
    epochs = source.count("num_iterations")
    values["actor.ppo_epochs"] = epochs
    if prompts > mini:
        values["actor.shuffle"] = True
    return max(1, round(generated / step)) * epochs


def _generated(source: Source, step: int) -> int:
    """Completions of a generation. The default is an optimizer step's; ours are never fewer."""
    if source.get("generation_batch_size") is not None:
        return max(source.count("generation_batch_size"), step)
    each = source.count("per_device_train_batch_size") * source.devices
    return max(each * source.whole("steps_per_generation"), step)


def _set_ppo(source: Source, values: dict[str, Any]) -> int:
    batch, parts = samples_a_step(source), source.count("num_mini_batches")
    if batch % parts:
        raise ConfigError(f"num_mini_batches={parts} does not divide the batch of {batch}")
    values["data.train_batch_size"] = batch
    values["actor.ppo_mini_batch_size"] = batch // parts
    values["actor.micro_batch_size"] = _pass(source, batch // parts)
    values["critic.micro_batch_size"] = values["actor.micro_batch_size"]
    values["actor.ppo_epochs"] = values["critic.ppo_epochs"] = source.count("num_ppo_epochs")
    values["actor.shuffle"] = True
    return 1


def set_steps(source: Source, values: dict[str, Any], notes: list[str], each: int) -> None:
    """`total_steps` and what counts steps; `each` is TRL's steps in one of ours."""
    batch = values["data.train_batch_size"]
    steps, episodes = source.number("max_steps"), source.number("total_episodes")
    epochs = source.number("num_train_epochs")
    if steps > 0:
        values["total_steps"] = math.ceil(steps / each)
    elif source.trainer == "ppo" and episodes:
        values["total_steps"] = math.ceil(episodes / batch)
    elif source.rows:
        values["total_steps"] = max(1, math.ceil(source.rows * epochs / batch))
    else:
        notes.append(
            f"total_steps: the number of rows is not known, so it has its default. {epochs:g} "
            f"epochs are {epochs:g} × rows / {batch} steps; --rows=N computes them"
        )
    total = values.get("total_steps", 0)
    if source.get("sync_ref_model"):
        _set_refresh(source, values, notes, each)
    values["save_every"] = _interval(source, "save", total, each, notes)
    values["validation.every"] = _interval(source, "eval", total, each, notes)
    _set_warmup(source, values, notes, total * each)


def _set_refresh(source: Source, values: dict[str, Any], notes: list[str], each: int) -> None:
    """The steps after which the reference follows the policy."""
    steps = source.count("ref_model_sync_steps")
    values["reference.refresh_every"] = max(1, round(steps / each))
    values["reference.mixup_alpha"] = float(source.number("ref_model_mixup_alpha"))
    if steps % each:
        notes.append(
            f"reference.refresh_every: a step of ours has {each} of TRL's, so "
            f"ref_model_sync_steps={steps} became {values['reference.refresh_every'] * each}"
        )


def _interval(source: Source, what: str, total: int, each: int, notes: list[str]) -> int:
    """Our steps between two events; 0 is only at the end."""
    strategy, steps = source.get(f"{what}_strategy"), source.number(f"{what}_steps")
    if strategy == "no":
        return 0
    if strategy == "epoch" or steps < 1:
        epochs = source.number("num_train_epochs") or 1
        share = 1 / epochs if strategy == "epoch" else steps
        if not total:
            notes.append(f"{what}_strategy: with unknown rows it is only at the end")
            return 0
        return max(1, round(share * total))
    return max(1, round(steps / each))


def _set_warmup(source: Source, values: dict[str, Any], notes: list[str], updates: int) -> None:
    """Optimizer steps of the warm-up; below 1 it is a share."""
    steps = source.number("warmup_steps") or source.number("warmup_ratio")
    if 0 < steps < 1:
        if not updates:
            notes.append(
                f"actor.optimizer.warmup_steps: {steps:g} of a number of steps that is not known; "
                "--rows=N computes it"
            )
            return
        steps = math.ceil(steps * updates)
    if steps:
        values["actor.optimizer.warmup_steps"] = int(steps)
        if source.trainer == "ppo":
            values["critic.optimizer.warmup_steps"] = int(steps)
