"""Runs that lack something, go on from another model's checkpoint, or must end early."""

import json
import shutil
from typing import Any

import pytest
from tiny_run import TinyRun

from jaxrl_llm.checkpoint.identity import MODELS, TOKENIZER, read_identity
from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.checkpoint.soundness import UselessWeights
from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.data.run_data import sft_batches
from jaxrl_llm.evaluation.answering import open_model
from jaxrl_llm.evaluation.trained_model import export_checkpoint
from jaxrl_llm.supervision import deadline
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.trainer.output import Summary

SMALL = {
    "total_steps": "1",
    "data.val_tasks": "[]",
    "warmup.steps": "1",
    "actor.ppo_epochs": "1",
    "checkpoint.best_metric": "",
    "log.tensorboard": "false",
}


def config_of(folder, **changes):
    run = TinyRun(folder)
    flags = SMALL | {"run_dir": str(run.run_dir)}
    flags |= {name.replace("__", "."): value for name, value in changes.items()}
    return run, load_config(str(folder / "tiny.py"), list(flags.items()))


@pytest.fixture(scope="module")
def of_one_step(tmp_path_factory) -> tuple[TinyRun, Summary]:
    run, config = config_of(tmp_path_factory.mktemp("run"))
    return run, train(config)


@pytest.mark.nightly
def test_a_run_without_validation_data_runs_without_validation(of_one_step):
    run, summary = of_one_step
    assert summary.step == 1 and not summary.totals.last
    metrics = run.metrics()
    assert list(metrics) == [0, 1] and "critic/score/mean" in metrics[1]
    assert not [name for name in metrics[1] if name.startswith("val-core")]


def test_the_summary_has_the_newest_value_of_every_metric(of_one_step):
    run, summary = of_one_step
    last = run.metrics()[1]  # without times
    del last["training/global_step"]
    assert "critic/score/mean" in last and "timing_s/step" in summary.metrics
    assert last == {name: summary.metrics[name] for name in last}
    assert summary.totals.best_step is None  # nothing was compared
    again = train(load_config(str(run.run_dir)))  # finished: all is read from its checkpoint
    assert again.metrics == summary.metrics and again.totals == summary.totals


def test_the_best_step_is_the_first_with_the_best_value(ppo_run: TinyRun):
    """Its config compares `actor/entropy`, which step 0 lacks."""
    totals = train(load_config(str(ppo_run.run_dir))).totals
    values = {step: row["actor/entropy"] for step, row in ppo_run.metrics().items() if step}
    assert totals.best_step == max(values, key=lambda step: values[step])
    assert (totals.best_metric, totals.best_value) == ("actor/entropy", max(values.values()))


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


@pytest.mark.nightly
def test_a_checkpoint_is_of_one_model(tmp_path, of_one_step, capsys):
    """Fault 6: a resume, an export and an opened model each compare what the files describe."""
    run = TinyRun(tmp_path)
    shutil.copytree(of_one_step[0].run_dir, run.run_dir)
    checkpoint = run.step_path(1)
    record = read_identity(checkpoint)
    assert record is not None and set(record[MODELS]) == {"actor", "critic", "reference"}
    assert record[TOKENIZER] == load_tokenizer("char").digest()

    again = {"run_dir": str(tmp_path / "again"), "resume": str(checkpoint)}
    theta = {"actor.hf_config.rope_theta": "500.0"}
    with pytest.raises(ConfigError, match=r"reference.rope_theta 10000.0 there, 500.0 now"):
        train(config_of(tmp_path, **again, **theta)[1])
    assert not (tmp_path / "again" / "metrics.jsonl").exists()
    capsys.readouterr()
    train(config_of(tmp_path, **again, total_steps="2", critic__remat="full")[1])
    assert "checkpoint: critic.remat none there, full now\n" in capsys.readouterr().out

    file = checkpoint.parent / "huggingface" / "config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"rms_norm_eps": 0.5}))
    for use in (
        lambda: export_checkpoint(checkpoint, tmp_path / "exported"),
        lambda: open_model(find_model_path(str(run.run_dir))),
    ):
        with pytest.raises(ConfigError, match=r"config.json describes.*rms_norm_eps 1e-06 there"):
            use()


def test_useless_weights_do_not_replace_a_checkpoint(tmp_path):
    """Fault 33: finite weights of 1e30 were saved as the last good checkpoint."""
    run, config = config_of(
        tmp_path,
        total_steps="3",
        save_every="1",
        checkpoint__keep_latest="1",
        algorithm='{"kind": "grpo"}',
        actor__ppo_mini_batch_size="16",  # one update: the gradient of a second is not finite
        actor__optimizer='{"learning_rate": 1e30}',
    )
    with pytest.raises(UselessWeights, match=r"step 1 is not saved: the weights of actor/.* 1e19"):
        train(config)
    assert run.saved_steps() == [0]


@pytest.mark.nightly
def test_a_run_saves_and_ends_before_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(deadline, "MARGIN_S", 3600.0)
    grpo = {"algorithm": '{"kind": "grpo"}'}
    run, config = config_of(tmp_path, **grpo, total_steps="9", checkpoint__save_by="+50m")
    summary = train(config)
    assert summary.interrupted and summary.step == 1
    assert run.saved_steps() == [0, 1]
