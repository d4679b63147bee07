"""Runs that lack something: no validation data, nothing to measure a warm-up by."""

import json
from typing import Any

import pytest
from tiny_run import TinyRun

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.data import sft_batches
from jaxrl_llm.trainer.run import train

SMALL = {
    "total_steps": "1",
    "data.val_tasks": "[]",
    "warmup.steps": "1",
    "actor.hf_config.num_hidden_layers": "1",
    "actor.ppo_epochs": "1",
    "checkpoint.best_metric": "",
    "log.tensorboard": "false",
}


def config_of(folder, **changes):
    run = TinyRun(folder)
    flags = SMALL | {"run_dir": str(run.run_dir)}
    flags |= {name.replace("__", "."): value for name, value in changes.items()}
    return run, load_config(str(folder / "tiny.py"), list(flags.items()))


def test_a_run_without_validation_data_runs_without_validation(tmp_path):
    run, config = config_of(tmp_path)
    summary = train(config)
    assert summary.step == 1 and not summary.totals.last
    metrics = run.metrics()
    assert list(metrics) == [0, 1] and "critic/score/mean" in metrics[1]
    assert not [name for name in metrics[1] if name.startswith("val-core")]


def test_a_warm_up_that_nothing_measures_cannot_stop_early(tmp_path):
    with pytest.raises(ConfigError, match="warmup.stop_at=0.5.*config.data.val_files"):
        config_of(tmp_path, warmup__stop_at="0.5")


def test_a_warm_up_on_prompts_alone_names_the_key_that_leaves_it_out(tmp_path):
    rows = [json.dumps({"prompt": "1+1=", "answer": "2"})] * 4
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    files = [("data.train_files", str(tmp_path / "mine.jsonl")), ("data.train_tasks", "[]")]
    config = load_config("ppo", files)
    assert config.warmup is not None
    no_rows: Any = None  # the data are refused first
    with pytest.raises(ConfigError, match=r"give no examples.* --config.warmup=null leaves"):
        sft_batches(config, config.warmup, load_tokenizer("char"), tmp_path, no_rows)
