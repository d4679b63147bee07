"""The library: the functions of `import jaxrl_llm as rl`, which the commands call too.

Each function prepares the process for jax, which is imported when the first of them is called.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.checkpoint.layout import find_checkpoint, find_model_path
from jaxrl_llm.config import (
    ChainSum,
    Config,
    ConfigError,
    Custom,
    DType,
    ExactAnswer,
    Grader,
    Overrides,
    apply_overrides,
    load_config,
    open_config,
)
from jaxrl_llm.config.placement import on_one_group
from jaxrl_llm.launch.interrupts import imports
from jaxrl_llm.launch.outputs import check_file, check_folder
from jaxrl_llm.launch.runtime import devices_are_used, fit_mesh, join_processes, prepare, start
from jaxrl_llm.observability.garbage import COLLECTOR
from jaxrl_llm.observability.status import STATUS
from jaxrl_llm.whole_files import write_whole

if TYPE_CHECKING:  # these import jax
    from jaxrl_llm.evaluation.answering import OpenModel
    from jaxrl_llm.supervision.callbacks import Callback
    from jaxrl_llm.trainer.output import Summary

Reward = Callable[..., Any] | Custom | Grader | str
DataRows = Sequence[Mapping[str, Any]]  # a datasets.Dataset is one too


def train(
    config: Config | str,
    *,
    rewards: Sequence[Reward] | None = None,
    reward_weights: Sequence[float] = (),
    tools: Sequence[Callable[..., Any] | str] | None = None,
    environment: Any = None,
    program: Callable[..., Any] | str | None = None,
    train_data: DataRows | None = None,
    val_data: DataRows | None = None,
    params: Mapping[str, Any] | None = None,
    callbacks: "Sequence[Callback]" = (),
    num_cpu_devices: int = 0,
    end_process: Callable[[int], None] | None = None,
) -> "Summary":
    """Train a model. If the run's folder has a checkpoint, resume from it.

    Args:
        config: a Config, or what `load_config` takes.
        rewards: functions, graders or paths that replace config.reward.functions. A function runs
            in worker processes, on a copy: changes that it makes stay in the worker.
        reward_weights: one weight for each of `rewards`; empty gives each the weight 1.
        tools: functions or paths that replace config.rollout.tools: docs/agents.md.
        environment: a class, a path, a record or a list; it replaces config.rollout.environment.
        program: an async function, or what config.rollout.program takes, which it replaces.
        train_data: rows that replace all data of the config, held-out data too.
        val_data: rows that replace the held-out data of the config.
        params: weights of the actor, in place of those at config.actor.path: nested dicts of
            arrays as a checkpoint has them, or a dict by Hugging Face's names. They are copied.
        callbacks: functions of a `StepReport`, called after each step on the main process.
        num_cpu_devices: split the CPU into this number of devices, to try a mesh; 0 does not split.
        end_process: pass `os._exit` to let the watchdog end a process whose step hangs.

    Requires: at a resume, the same functions, rows and weights. Changed ones are refused.
    Guarantees: on Ctrl-C, and when a callback stops it, the run saves a checkpoint and returns.
    Raises: ConfigError for settings that cannot work, before a device is touched.
    """
    callbacks = list(callbacks)
    if not all(map(callable, callbacks)):  # the first step would say so, minutes later
        raise ConfigError(f"callbacks={callbacks}: expected functions")
    config = config if isinstance(config, Config) else load_config(config)
    if tools is not None:
        config = apply_overrides(config, {"rollout.tools": [*tools]})
    if environment is not None:
        config = apply_overrides(config, {"rollout.environment": environment})
    if program is not None:
        config = apply_overrides(config, {"rollout.program": program})
    if params is not None:
        config = apply_overrides(config, {"actor.params": params})
    config = _with_objects(config, rewards, reward_weights, train_data, val_data)
    with started(config, num_cpu_devices=num_cpu_devices) as config:
        from jaxrl_llm.trainer.loop import train

        summary = train(config, callbacks=callbacks, end_process=end_process)
    from jaxrl_llm.trainer.output import print_summary

    print_summary(summary, config)
    return summary


@contextmanager
def started(config: Config, *, num_cpu_devices: int = 0) -> Iterator[Config]:
    """The start of a run: the config with the mesh that is used, and the trainer imported."""
    STATUS.begin()
    COLLECTOR.begin_start()
    try:
        STATUS("importing jax")
        yield start(config, num_cpu_devices=num_cpu_devices, meanwhile=_import_trainer)
    finally:
        STATUS.end()  # where it was refused before the console took over
        COLLECTOR.end_start()


def _import_trainer() -> None:
    STATUS("importing the trainer")
    with imports():
        import jaxrl_llm.trainer.loop  # noqa: F401


def _with_objects(
    config: Config,
    rewards: Sequence[Reward] | None,
    reward_weights: Sequence[float],
    train_data: DataRows | None,
    val_data: DataRows | None,
) -> Config:
    """The config with the objects of a program, checked."""
    changes: dict[str, Any] = {}
    if rewards is not None:
        changes |= {"reward.functions": [*rewards], "reward.weights": [*reward_weights]}
    elif reward_weights:
        raise ConfigError("reward_weights need `rewards`, which are not given")
    if train_data is not None:
        changes |= {"data.train_files": [], "data.train_tasks": [], "data.dataset_class": ""}
        changes |= {"data.train_rows": train_data}
    if train_data is not None or val_data is not None:
        changes |= {"data.val_files": [], "data.val_tasks": [], "data.val_rows": val_data}
    return load_config(config, changes)


def open_model(
    model: str | Path, *, dtype: DType = "float32", family: str = "", tensor: int = 1
) -> "OpenModel":
    """Open a trained model to generate with: `open_model("runs/ppo").generate(["1+2="])`.

    `model` is a Hugging Face folder, a checkpoint, or a run's folder (its newest checkpoint). The
    model is on the first `tensor` devices, which share its heads, and computes in `dtype`. `family`
    is a family of yours, by path.

    Raises: ConfigError if there is no model, ValueError if it cannot be opened.
    """
    path = find_model_path(str(model))
    prepare()
    with imports():
        from jaxrl_llm.evaluation.answering import open_model

    return open_model(path, dtype=dtype, family=family, tensor=tensor)


def evaluate(
    model: str | Path,
    config: Config | str,
    *,
    overrides: Overrides = (),
    val_data: DataRows | None = None,
    grader: Reward | None = None,
    output: str | Path | None = None,
    answers: str | Path | None = None,
    num_cpu_devices: int = 0,
) -> dict[str, Any]:
    """Generate and grade answers to held-out prompts, as the validation of a run does.

    The stages and training data of the config are not used, and its rewards only without a grader.

    Args:
        overrides: changes of the config, as `load_config` takes them.
        val_data, grader: replace the config's.
        output: a file for the report, as JSON.
        answers: a file for every answer with its grade, as JSON lines.

    Returns: a report with the `metrics` under their names in a run, `num_samples` of each data
        source, and the settings of sampling.
    Raises: ConfigError without validation data, or for settings that cannot work.
    """
    path = find_model_path(str(model)).path
    # The model replaces the config's own, whose folder need not exist here.
    opened = config if isinstance(config, Config) else open_config(config)
    opened = apply_overrides(opened, {"actor.path": path, "data.tokenizer": ""})
    opened = apply_overrides(opened, overrides)
    changes: dict[str, Any] = {"data.train_rows": None, "stages": []}
    graded = grader is not None or opened.validation.grader is not None
    no_functions = not opened.reward.functions and opened.reward.model is None
    if no_functions or (graded and opened.reward.functions):  # no reward function is called
        changes |= {"reward.functions": [ExactAnswer()], "reward.weights": []}
    if not (opened.data.train_files or opened.data.dataset_class):
        changes["data.train_tasks"] = [ChainSum()]
    if val_data is not None:
        changes |= {"data.val_files": [], "data.val_tasks": [], "data.val_rows": val_data}
    if grader is not None:
        changes["validation.grader"] = grader
    config = load_config(opened, changes)
    data = config.data
    if not (data.val_files or data.val_tasks or data.val_rows):
        raise ConfigError(
            "config.data has no validation data: set --config.data.val_files=[FILE] or "
            "--config.data.val_tasks=[chain_sum]"
        )
    for name, file in (("output", output), ("answers", answers)):
        if file is not None:
            check_file(f"--{name}", Path(file))
    prepare(num_cpu_devices=num_cpu_devices)
    join_processes()
    config = on_one_group(config, fit_mesh(config.mesh))
    with imports():
        from jaxrl_llm.distributed.multihost import is_main
        from jaxrl_llm.evaluation.evaluation_report import all_answers
        from jaxrl_llm.evaluation.trained_model import evaluate, validation_report
        from jaxrl_llm.observability.jsonl import to_line

    evaluation = evaluate(config)
    report = validation_report(config, str(model), evaluation)
    rows = [] if answers is None else all_answers(evaluation)
    if is_main():
        if output is not None:
            write_whole(Path(output), json.dumps(report, indent=2) + "\n")
        if answers is not None:
            write_whole(Path(answers), "".join(map(to_line, rows)))
    return report


def export(
    model: str | Path,
    output: str | Path,
    *,
    role: str = "actor",
    dtype: str | None = None,
    adapter: bool = False,
    max_shard_bytes: int | None = None,
    family: str = "",
) -> Path:
    """Write a checkpoint as a Hugging Face folder, which `from_pretrained` opens. Returns its path.

    `model` is a checkpoint or a run's folder (its newest checkpoint). `role` is actor, critic,
    reward, reference, teacher or the name of a model in config.models. `dtype` is by default the
    dtype of the stored weights. LoRA adapters are merged into their base. With `adapter=True` only
    they are written, in PEFT's files. `family` is a family of yours, by path.

    Raises: ConfigError if there is no such checkpoint or role, or `output` takes no files.
    """
    checkpoint = find_checkpoint(str(model))
    check_folder("--output", Path(output))
    # An export only copies, and CPU memory is larger.
    prepare(num_cpu_devices=0 if devices_are_used() else 1)
    with imports():
        from jaxrl_llm.evaluation.trained_model import export_checkpoint
        from jaxrl_llm.models.families import use_family

    if family:
        use_family(family)
    limit = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    return export_checkpoint(checkpoint, output, role=role, dtype=dtype, adapter=adapter, **limit)
