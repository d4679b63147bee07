"""GRPO and TRL's GRPOTrainer: what TRL is given, what is refused, and the table.

The last test runs both sides on a tiny model, where TRL is installed: every step is there, and what
TRL's trainer ended up with is what it was given.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chat_tokenizer import write_chat_tokenizer
from tiny_models import tiny_config, write_directory

from benchmarks.against_trl import table
from benchmarks.trl_work import ALIKE, trl_setup, trl_work
from jaxrl_llm.config import Config, ConfigError, apply_override, load_config
from jaxrl_llm.data.run_data import load_run_prompts, train_batches, train_sources
from jaxrl_llm.plan.models import find_tokenizer

ROOT = Path(__file__).parents[2]
FILE = str(ROOT / "configs" / "grpo_smollm2_trl.py")
TASKS = "[{kind: chain_sum, num_terms: 2, size: 16}]"  # 24 prompts are over an epoch


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    """The config on a tiny model: a character is a token, so prompts are longer."""
    directory = write_directory(
        tmp_path_factory.mktemp("model") / "hf",
        tiny_config("llama", vocab_size=104, tie_word_embeddings=True),
    )
    write_chat_tokenizer(directory)
    changes = [
        ("actor.path", str(directory)),
        ("total_steps", "3"),
        ("data.train_tasks", TASKS),
        ("data.train_batch_size", "8"),
        ("data.max_prompt_length", "224"),
        ("data.max_response_length", "6"),
        ("actor.ppo_mini_batch_size", "4"),
        ("actor.micro_batch_size", "8"),
        ("rollout.n", "4"),
        ("seed", "5"),
    ]
    return load_config(FILE, changes)


def test_trl_gets_our_prompts_in_our_order(config):
    work = trl_work(config)
    tokenizer = find_tokenizer("", config.actor)
    prompts = load_run_prompts(config, train_sources(config), tokenizer, None)
    batches = train_batches(config, prompts)
    ours = [prompt for _ in range(3) for prompt in next(batches)]
    assert [row["token_ids"] for row in work["rows"]] == [list(p.token_ids) for p in ours]
    assert [row["ground_truth"] for row in work["rows"]] == [p.ground_truth for p in ours]
    assert work["rows"][0]["prompt"][0]["role"] == "user"
    other = trl_work(replace(config, seed=6))["rows"]
    assert [row["token_ids"] for row in other] != [row["token_ids"] for row in work["rows"]]
    json.dumps(work)


def test_batches_are_counted_alike(config):
    """32 samples an iteration in two optimizer steps, each of two passes of 8."""
    settings = trl_setup(config)["settings"]
    assert settings["per_device_train_batch_size"] == 8
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["steps_per_generation"] == 4
    assert settings["max_steps"] == 6 and trl_setup(config)["updates"] == 2
    whole = apply_override(config, "actor.micro_batch_size", "0")
    assert trl_setup(whole)["settings"]["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("key", "value", "name", "given"),
    [
        ("algorithm.use_kl_loss", "False", "beta", 0.0),
        ("algorithm.norm_adv_by_std", "False", "scale_rewards", "none"),
        ("algorithm.clip_high", "0.28", "epsilon_high", 0.28),
        ("algorithm.loss_aggregation", "seq-mean-token-sum-norm", "loss_type", "dr_grpo"),
        ("actor.optimizer.learning_rate", "1e-6", "learning_rate", 1e-6),
        ("actor.ppo_epochs", "2", "max_steps", 12),
        ("rollout.min_p", "0.1", "min_p", 0.1),
    ],
)
def test_settings_that_trl_has_are_passed_on(config, key, value, name, given):
    before = trl_setup(config)["settings"]
    after = trl_setup(apply_override(config, key, value))["settings"]
    assert after[name] == given != before[name]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm", "rloo"),
        ("algorithm.entropy_coef", "0.01"),
        ("algorithm.rollout_is", "token"),
        ("algorithm.kl_loss_type", "k1"),
        ("algorithm.kl_loss_type", "low_var_kl"),
        ("algorithm.loss_aggregation", "token-mean"),  # with gradient accumulation
        ("actor.optimizer.weight_decay", "0.01"),
        ("actor.optimizer.warmup_steps", "3"),
        ("rollout.quantization", "float8"),
        ("actor.shuffle", "False"),
        ("mesh.data", "2"),
        ("reward.functions", "[]"),
        ("reward.functions", "[{kind: length_range, maximum: 4}]"),
    ],
)
def test_what_trl_cannot_do_alike_is_refused(config, key, value):
    leaf = "functions" if key == "reward.functions" else key.split(".")[-1]
    leaf = "mesh" if key.startswith("mesh") else leaf
    with pytest.raises(ConfigError, match=leaf):
        trl_setup(apply_override(config, key, value))


def test_every_refusal_names_a_key_that_exists(config):
    for key in ALIKE:
        found = config
        for name in key.split("."):
            found = getattr(found, name)


def test_table_by_hand(tmp_path):
    file = tmp_path / "curves.jsonl"
    common = {"side": "ours", "seed": 1}
    rewards = [0.0, 0.2, 0.4, 0.6]
    records = [
        *(common | {"step": i + 1, "reward": r, "seconds": 9.0 - i} for i, r in enumerate(rewards)),
        common | {"wall_seconds": 40.0, "exit_code": 0},
        {"side": "trl", "seed": 1, "step": 1, "reward": 0.5, "seconds": 2.0},
        {"side": "trl", "seed": 1, "wall_seconds": 9.0, "exit_code": -9},  # cut
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert table(file, 2)[2:] == [
        "| ours | 1 | 4 | 0.300 | 0.500 | 9.0 | 7.000 | 40.0 |",
        "| trl | 1 | 1 | 0.500 | 0.500 | 2.0 | - | cut |",
    ]
    file.write_text(file.read_text() * 2)
    with pytest.raises(ValueError, match="another --output"):
        table(file, 2)


@pytest.mark.slow
def test_trl_itself(config, tmp_path):
    """Both sides through the script: TRL's own settings are ours, and every step is there."""
    pytest.importorskip("trl", reason="TRL is not installed: pip install -e .[parity]")
    output = tmp_path / "curves.jsonl"
    overrides = {
        "actor.path": config.actor.path,
        "actor.dtype": "float32",
        "total_steps": 3,
        "data.train_tasks": TASKS,
        "data.val_tasks": TASKS,
        "data.train_batch_size": 8,
        "data.max_prompt_length": 224,
        "data.max_response_length": 6,
        "actor.ppo_mini_batch_size": 4,
        "actor.micro_batch_size": 8,
        "rollout.n": 4,
    }
    command = [sys.executable, str(ROOT / "scripts" / "compare_trl.py"), f"--config={FILE}"]
    command += [f"--config.{key}={value}" for key, value in overrides.items()]
    command += [f"--output={output}", "--seeds=[7]", f"--work_folder={tmp_path / 'work'}"]
    done = subprocess.run([*command, "--window=1"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, trl = table(output, 1)[2:]
    assert ours.startswith("| ours | 7 | 3 |") and trl.startswith("| trl | 7 | 3 |")
    assert "cut" not in ours + trl
    records = [json.loads(line) for line in output.read_text().splitlines()]
    (settings,) = [record["settings"] for record in records if "settings" in record]
    given = trl_setup(apply_override(replace(config, seed=7), "actor.dtype", "float32"))["settings"]
    for name, value in given.items():
        if name in settings:
            assert settings[name] == value, name
    assert settings["generation.top_k"] == 0 and settings["generation.max_new_tokens"] == 6
    assert settings["reference"] and settings["weights"] == ["torch.float32"]
