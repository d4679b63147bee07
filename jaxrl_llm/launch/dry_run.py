"""A dry run: plans the run on this machine, reads its data, and computes nothing."""

from collections import Counter
from contextlib import ExitStack

import jax

from jaxrl_llm.config import Config, is_offline, to_json
from jaxrl_llm.data.run_data import train_sources
from jaxrl_llm.data.shown_rows import shown_rows
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.estimate.estimate import Estimate
from jaxrl_llm.estimate.fitting import planned_here
from jaxrl_llm.estimate.report import generation_line
from jaxrl_llm.launch.host_memory import host_memory
from jaxrl_llm.plan.models import find_tokenizer, open_meshes
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.supervision.disk_space import bytes_of, check_space
from jaxrl_llm.supervision.run_folder import RunFolder, open_run_folder
from jaxrl_llm.tokenizer import Tokenizer, set_chat_variables
from jaxrl_llm.trainer.data import RunData, open_plan_and_data
from jaxrl_llm.trainer.output import reward_text
from jaxrl_llm.trainer.run import refuse_overwriting
from jaxrl_llm.trainer.shown_settings import settings_line, warnings_of_run
from jaxrl_llm.trainer.states import open_supervised

RESOLVED = "resolved_config.json"
GB = 1e9


def dry_run(config: Config, *, show: int = 0) -> list[str]:
    """Plan the run, read its data and check its folder; lines about them and of `show` rows.

    Writes `resolved_config.json` into the run's folder, and no array.
    Raises: what a start of the run raises before its first step.
    """
    with open_run_folder(config) as folder, ExitStack() as stack:
        refuse_overwriting(config, folder.path, folder.latest_step)
        tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
        set_chat_variables(tokenizer, config.data.chat_template_kwargs)
        meshes = open_meshes(config, tokenizer)
        new = folder.is_new(config)
        plan, data = open_plan_and_data(config, tokenizer, meshes, folder.path, stack, new=new)
        if new:
            open_supervised(plan, tokenizer, data.validator, folder.path)
        checkpoint = bytes_of(plan.abstract_states())
        check_space(folder.path, checkpoint)
        resolved = folder.path / RESOLVED
        if is_main():
            resolved.write_text(to_json(config))
        return [
            *_folder_lines(config, folder),
            *_size_lines(config, data),
            *_settings_lines(config, plan),
            *(_rows_lines(config, plan, tokenizer, show) if show else ()),
            "stages of a step; a + joins the stages of one program",
            *(f"  {_segment(segment, plan)}" for segment in plan.at(1).program.segments),
            "models",
            *(f"  {_model(role)}" for role in plan.roles.values()),
            *_memory_lines(planned_here(config)),
            f"a checkpoint takes up to {_gb(checkpoint)}",
            f"wrote {resolved}",
            "dry run: nothing was trained",
        ]


def _rows_lines(config: Config, plan: Plan, tokenizer: Tokenizer, show: int) -> list[str]:
    purpose = "prompts" if not is_offline(config) else plan.record_algorithm.records.name
    sources, keep = train_sources(config), config.data.keep_thinking
    return list(shown_rows(sources, purpose, tokenizer, show, keep_thinking=keep))


def _folder_lines(config: Config, folder: RunFolder) -> list[str]:
    kinds = Counter(device.device_kind for device in jax.devices())
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    step, total = folder.latest_step, config.total_steps
    state = "a new run" if step is None else f"goes on from step {step}"
    if step is None and config.resume not in ("auto", "never"):
        state = f"goes on from {config.resume}"
    if folder.nothing_to_do(total):
        state = "all steps are done"
    return [f"{config.name} in {folder.path}: {state}, {total} steps in all", f"devices: {devices}"]


def _size_lines(config: Config, data: RunData) -> list[str]:
    per_epoch = data.num_rows // config.data.train_batch_size
    batch, n = config.data.train_batch_size, config.rollout.n if data.records is None else 1
    samples = f" x {n} samples" if n > 1 else ""
    return [
        f"data: {data.num_rows} training rows, {data.num_held_out} held-out rows",
        f"a step: {batch} rows{samples}, up to {config.data.max_prompt_length} + "
        f"{config.data.max_response_length} tokens each; {per_epoch or 'less than 1'} "
        f"step{'s' * (per_epoch > 1)} an epoch",
    ]


def _settings_lines(config: Config, plan: Plan) -> list[str]:
    reward = reward_text(config.reward)
    return [
        f"settings: {settings_line(config)}",
        *([f"reward: {reward}"] if reward else []),
        *warnings_of_run(plan),
    ]


def _segment(segment: Segment, plan: Plan) -> str:
    number = plan.at(1).program.number_of_programs(segment)
    where = f"compiled as a chain of {number} programs" if number > 1 else "compiled"
    where = where if number else "on the host"
    return f"{segment.name} ({where}): {', '.join(segment.reads) or 'nothing'} -> " + (
        ", ".join(name for stage in segment.stages for name in stage.writes) or "new weights"
    )


def _model(role: Role) -> str:
    spec = role.spec
    learns = "frozen" if role.optimizer is None else "learns"
    shape = f"{spec.config.num_layers} layers of {spec.config.hidden_size}"
    return f"{role.name}: {spec.num_params:,} parameters, {shape}, {learns}"


def _memory_lines(planned: Estimate) -> list[str]:
    used = max(planned.temporaries.items(), key=lambda of: of[1], default=("", 0.0))
    stats = jax.local_devices()[0].memory_stats() or {}
    has = stats.get("bytes_limit") or host_memory()
    whose = "a device" if "bytes_limit" in stats else "this machine"
    kept = ", ".join(f"{role} {_gb(size)}" for role, size in planned.kept.items())
    lines = [
        "memory of a device, by the planner without compiling",
        f"  kept: {kept}",
        f"  on top in the largest stage, {used[0]}: {_gb(used[1])}",
        f"  peak: {_gb(planned.peak)}; {whose} has {_gb(has)}",
    ]
    if line := generation_line(planned):
        lines.append(f"  {line}")
    if planned.peak > has:
        lines.append("  it may not fit: `jaxrl plan` shows what each stage needs, and layouts")
    return lines


def _gb(size: float) -> str:
    return f"{size / GB:.3g} GB"
