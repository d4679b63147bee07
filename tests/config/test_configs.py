"""Every file in configs/ loads, is valid and plans, without weights or data from outside.

One of each kind is traced before each change, the others at night.

Where a config wants files that do not come with the project, tiny ones of the same kind stand in.
"""

import json
import re
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizer import write_chat_tokenizer
from further import further
from tiny import model_config
from tiny_models import tiny_config, write_directory

from jaxrl_llm.config import (
    SFT,
    Config,
    from_json,
    is_offline,
    load_config,
    open_config,
    to_json,
)
from jaxrl_llm.data.run_data import held_out_sources, load_records, load_run_prompts, train_sources
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import Mixture
from jaxrl_llm.plan.models import find_tokenizer
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.roles import make_role, update_sizes
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import OFFLINE_FIELDS

FILES = sorted((Path(__file__).parents[2] / "configs").glob("[!_]*.py"))
# A critic, groups, experts, adapters, images, turns, a teacher, a reward model, greedy answers and
# each kind of records.
TRACED = "ppo dapo grpo_moe grpo_lora grpo_vision agent distillation ppo_reward_model remax".split()
TRACED += "dpo kto sft reward_model".split()
TRACED_LATER = [file for file in FILES if file.stem not in TRACED]
ONE_PROGRAM = "gen+old_log_prob+ref+values+reward+kl+adv+update_critic+update_actor"


def stand_ins(config: Config, folder: Path) -> list[tuple[str, str]]:
    """Overrides that replace what is not part of the project."""
    changes = []
    pretrained = not config.actor.path and not config.actor.hf_config  # a path has to be given
    if config.actor.path or pretrained:
        family = "qwen2" if "qwen" in config.actor.path.lower() else "llama"
        more: dict[str, Any] = {"attention_bias": True} if family == "qwen2" else {}
        if config.actor.path.endswith("_moe"):
            experts = Mixture(num_experts=4, experts_per_token=2, expert_size=40, normalized=True)
            family, more = "mixtral", {"mixture": experts}
        model = tiny_config(family, vocab_size=104, tie_word_embeddings=True, **more)
        directory = write_directory(folder / "model", model)
        write_chat_tokenizer(directory)
        # A character a token: prompts of the stand-in are longer than a real tokenizer's.
        length = 4 * config.data.max_prompt_length
        changes += [("actor.path", str(directory)), ("data.max_prompt_length", str(length))]
    if config.data.tokenizer not in ("", "char"):
        tokenizer = folder / "tokenizer"
        write_chat_tokenizer(write_directory(tokenizer, tiny_config()))
        changes.append(("data.tokenizer", str(tokenizer)))
    if config.name not in ("ppo", "dpo"):  # these two load all problems, for all others of a kind
        for key in ("train", "val"):
            tasks = [
                {"kind": t.kind, **asdict(replace(t, size=64))}
                for t in getattr(config.data, f"{key}_tasks")
            ]
            changes += [(f"data.{key}_tasks", json.dumps(tasks))] if tasks else []
    for key, files in (("train", config.data.train_files), ("val", config.data.val_files)):
        if files or pretrained:
            file = folder / f"{key}.parquet"
            row = pair_row if is_offline(config) else verl_row
            row = example_row if isinstance(config.algorithm, SFT) else row
            pq.write_table(pa.Table.from_pylist([row(i) for i in range(4)]), file)
            changes.append((f"data.{key}_files", f"[{file}]"))
    return changes


def pair_row(index: int) -> dict:
    """A preference row."""
    return {"prompt": "Rate.", "chosen": f"good {index}", "rejected": f"bad {index}"}


def example_row(index: int) -> dict:
    """A supervised row."""
    return {"prompt": "Rate.", "completion": f"good {index}"}


def verl_row(index: int) -> dict:
    """A row as verl's GSM8K preprocessing writes it."""
    question = f"Ann has {index} pears and buys 2. How many are there? "
    hint = 'Let\'s think step by step and output the final answer after "####".'
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question + hint}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 2)},
        "extra_info": {"split": "train", "index": index, "answer": "", "question": question},
    }


def no_reward(*_: object) -> Any:
    raise AssertionError("tracing runs no Python reward")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_loads_and_plans(file, tmp_path):
    config, tokenizer, plan = planned(file, tmp_path)
    for sources in (train_sources(config), held_out_sources(config)):
        if is_offline(config):
            kind = plan.record_algorithm.records
            assert load_records(config, sources, kind.name, tokenizer, None)
        else:
            prompts = load_run_prompts(config, sources, tokenizer, None)
            assert all(prompt.ground_truth is not None for prompt in prompts)
    if not is_offline(config):
        for iteration in plan.phases:
            names = {stage.name for stage in iteration.stages}
            assert {"gen", "reward", "adv", "update_actor"} <= names


def planned(file: Path, folder: Path) -> tuple[Config, Tokenizer, Plan]:
    config = load_config(str(file), stand_ins(open_config(str(file)), folder))
    tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
    if is_offline(config):
        return config, tokenizer, plan_offline(config, tokenizer, make_mesh())
    parts = tuple(f.label for f in config.reward.functions)
    parts += ("environment",) * bool(config.rollout.environment)
    reward = ArrayReward(no_reward, parts) if parts else None
    return config, tokenizer, plan_online(config, tokenizer, make_mesh(), reward)


@pytest.mark.parametrize(
    "file",
    further([*(f for f in FILES if f.stem in TRACED), *TRACED_LATER], first=len(TRACED)),
    ids=lambda file: file.stem,
)
def test_its_programs_trace(file, tmp_path):
    config, _, plan = planned(file, tmp_path)
    if is_offline(config):
        batch = plan.at(1).trace()
        for name in plan.record_algorithm.reads:
            if name in OFFLINE_FIELDS:
                assert getattr(batch, name).shape == (config.data.train_batch_size,), name
        return
    rows = config.data.train_batch_size * config.rollout.n
    for iteration in plan.phases:
        batch = iteration.trace()
        assert batch.advantages is not None
        assert batch.advantages.shape == (rows, config.data.max_response_length)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_opens_with_its_command_and_survives_json(file):
    config = open_config(str(file))
    assert config.name == file.stem
    assert f"python scripts/train.py --config=configs/{file.name}" in file.read_text()[:1000]
    assert from_json(to_json(config)) == config
    assert json.loads(to_json(config))["total_steps"] == config.total_steps


def test_with_a_reward_model_an_iteration_is_one_program():
    file = next(file for file in FILES if file.stem == "ppo_reward_model")
    config = load_config(str(file))
    tokenizer = find_tokenizer("char", config.actor)
    (phase,) = plan_online(config, tokenizer, make_mesh(), None).phases
    (segment,) = phase.program.segments
    assert not segment.is_host
    assert sorted(segment.name.split("+")) == sorted(ONE_PROGRAM.split("+"))


def test_readme_and_docs_name_only_configs_that_exist():
    root = FILES[0].parents[1]
    pages = [root / "README.md", root / "BUILD.md", *(root / "docs").glob("*.md")]
    known = {file.name for file in FILES}
    for page in pages:
        for name in re.findall(r"--config=configs/(\w+\.py)", page.read_text()):
            made_there = name == "weighted_reinforce.py" and page.name == "add-an-algorithm.md"
            assert name in known or made_there, f"{page.name} names configs/{name}"


def test_the_example_of_porting_a_model_is_the_code():
    root = FILES[0].parents[1]
    page, code = (root / "docs/port-a-model.md").read_text(), (root / "models/qwen3.py").read_text()
    blocks = re.findall(r"^ *```python\n(.*?)```", page, re.S | re.M)
    assert blocks
    for block in blocks:
        for part in textwrap.dedent(block).strip().split("\n\n\n"):
            assert part in code


@pytest.mark.parametrize(
    ("settings", "of_updates", "of_log_probs"),
    [
        ({}, 4, 4),
        ({"share_prompts": False}, 1, 1),
        ({"shuffle": True}, 1, 4),  # samples of a prompt are apart in updates alone
    ],
)
def test_prompts_are_shared_as_the_config_says(settings, of_updates, of_log_probs):
    config = Config()
    config = replace(
        config,
        actor=replace(config.actor, micro_batch_tokens=512, **settings),
        rollout=replace(config.rollout, n=4),
    )
    spec, mesh = model_spec(model_config()), make_mesh(1, 1, 1)
    actor, critic = (make_role(name, spec, config.actor, mesh) for name in ("actor", "critic"))
    sizes = update_sizes(config, actor)
    assert isinstance(sizes.update, Packed) and isinstance(sizes.passes, Packed)
    assert (sizes.update.group, sizes.passes.group) == (of_updates, of_log_probs)
    assert sizes.update.row_tokens == sizes.passes.row_tokens == 512
    assert isinstance(update_sizes(config, critic).update, Padded)


def test_a_critic_warms_up_in_the_first_phase_that_has_one():
    file = next(file for file in FILES if file.stem == "ppo_reward_rejection")
    config = load_config(str(file), [])
    (phase,) = config.phases
    config = replace(
        config,
        phases=(phase, replace(phase, algorithm=config.algorithm, steps=7)),
        critic=replace(config.critic, warmup_steps=5),
    )
    tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
    iterations = plan_online(config, tokenizer, make_mesh(), None).phases
    assert ["critic" in iteration.roles for iteration in iterations] == [False, True, True]
    ends = [iteration.config.critic.warmup_steps for iteration in iterations]
    assert ends[1:] == [phase.steps + 5] * 2
