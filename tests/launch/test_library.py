"""`import jaxrl_llm as rl`: objects of a program in place of files, callbacks, cheap import."""

import json
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny import SUMS as ROWS
from tiny_program import EXACT, program_config
from tiny_run import read_jsonl

import jaxrl_llm as rl
from jaxrl_llm.config import Given
from jaxrl_llm.data.run_data import load_run_prompts, train_sources
from jaxrl_llm.object_digests import function_digest, rows_digest
from jaxrl_llm.tokenizer import CharTokenizer

ROOT = Path(__file__).parents[2]


def config(folder: Path, **changes: Any) -> rl.Config:
    """A run of seconds without data and without a reward, which a program gives."""
    return program_config(folder / "run", **{"total_steps": 4, "save_every": 0} | changes)


def from_a_notebook(text: str, **names: Any) -> Any:
    """The function `grade` of a text, as a cell of a notebook defines it: there is no file."""
    namespace, cell = {"__name__": "__main__", **names}, f"<cell {len(linecache.cache)}>"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    exec(compile(text, cell, "exec"), namespace)
    return namespace["grade"]


LENGTH = """
def helper(text, target):
    return float(len(text) == target)
def grade(completions, answer):
    assert len(answer) == len(completions)
    return [helper(text, {target}) for text in completions]
"""


def documented_tracker(folder: Path) -> str:
    """The path of the class that docs/trackers.md shows."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trackers.md").read_text(), re.DOTALL)
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:MyTracker"


# ------------------------------------------------------------------------- the import


def test_the_import_is_cheap_and_its_names_are_there():
    code = (
        "import sys, jaxrl_llm as rl; assert rl.__version__; print(len(sys.modules));"
        "assert not {'jax', 'numpy', 'pydantic'} & set(sys.modules), 'heavy';"
        "rl.Config, rl.GRPO, rl.load_config; assert 'jax' not in sys.modules;"
        "rl.train, rl.open_model, rl.evaluate, rl.export; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
    assert {"Config", "GRPO", "train", "StepReport", "load_config"} <= set(dir(rl))
    assert all(getattr(rl, name) is not None for name in dir(rl))
    with pytest.raises(AttributeError, match="trian"):
        _ = rl.trian  # pyright: ignore[reportAttributeAccessIssue]


def test_the_version_is_that_of_the_wheel():
    from importlib.metadata import version

    assert rl.__version__ == version("jaxrl_llm")


def test_load_config_takes_values_and_texts():
    found = rl.load_config("grpo", {"actor.optimizer.learning_rate": 1e-5, "rollout.n": "4"})
    assert (found.actor.optimizer.learning_rate, found.rollout.n) == (1e-5, 4)
    again = rl.load_config(found, {"data.train_tasks": [rl.ChainSum(size=8)]})
    assert again.data.train_tasks == (rl.ChainSum(size=8),)
    with pytest.raises(rl.ConfigError, match="did you mean 'config.seed'"):
        rl.load_config("grpo", {"sed": 1})
    with pytest.raises(rl.ConfigError, match="rollout.n=0: must be 1 or more"):
        rl.load_config("grpo", {"rollout.n": 0})


# ------------------------------------------------------------------------- a run


def test_functions_rows_and_callbacks_of_a_program(tmp_path):
    """One run: it is stopped by a callback, goes on, refuses other objects, and is opened."""
    grade = from_a_notebook(LENGTH.format(target=2))
    log = rl.LogConfig(samples_every=3, num_samples=2, trackers=(documented_tracker(tmp_path),))
    seen: list[rl.StepReport] = []

    def watch(report: rl.StepReport) -> None:
        seen.append(report)
        if report.step == 2:
            report.stop("seen enough")

    def run(**objects: Any) -> rl.Summary:
        given = {"rewards": [grade], "train_data": ROWS, "val_data": ROWS[:4]} | objects
        return rl.train(config(tmp_path, log=log), **given)

    summary = run(callbacks=[watch])
    assert (summary.step, summary.called_off, summary.interrupted) == (2, True, False)
    assert summary.reason == "seen enough" and summary.checkpoint.is_dir()
    assert [report.step for report in seen] == [0, 1, 2]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert "val-core/val_data/acc/mean@1" in seen[0].metrics and seen[0].samples == []
    for row, report in zip(rows[1:], seen[1:], strict=True):
        assert len(report.samples) == 16
        scores = [float(len(sample.response) == 2) for sample in report.samples]
        assert [sample.score for sample in report.samples] == scores
        assert sum(scores) / 16 == pytest.approx(row["critic/score/mean"])
        assert report.metrics["critic/score/mean"] == row["critic/score/mean"]
        assert all(len(sample.logprobs) == len(sample.tokens) for sample in report.samples)
    # Its config.json names the objects, and no file can give them.
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["reward"]["functions"][0]["path"] == "object:grade"
    assert stored["data"]["train_rows"] == {"num_rows": 16, "digest": rows_digest(ROWS)}
    with pytest.raises(rl.ConfigError, match=r"rl.train\(config, train_data=rows\)"):
        rl.load_config(str(tmp_path / "run"))
    with pytest.raises(rl.ConfigError, match=r"rewards=\[grade\]"):
        rl.load_config(str(tmp_path / "run"), {"data.train_rows": ROWS, "data.val_rows": ROWS})
    # Other objects are another run; the same ones, of another process, go on.
    with pytest.raises(rl.ConfigError, match="reward.functions.0.digest"):
        run(rewards=[from_a_notebook(LENGTH.format(target=3))])
    with pytest.raises(rl.ConfigError, match="data.train_rows.digest"):
        run(train_data=[*ROWS[1:], ROWS[0]])
    again = from_a_notebook("# a comment" + LENGTH.format(target=2))
    summary = run(rewards=[again])
    assert (summary.step, summary.called_off) == (4, False)
    # The class of docs/trackers.md saw each step once, and samples of steps 1 and 3.
    lines = (tmp_path / "run" / "mine.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "1", "2", "3", "3", "4"]
    assert sum("'ground_truth'" in line for line in lines) == 2
    assert (tmp_path / "run" / "tensorboard" / "hparams").is_dir()
    model = rl.open_model(tmp_path / "run")
    (answer,) = model.generate(["1+1="], max_new_tokens=3, n=2)
    assert len(answer.completions) == 2 and answer.text == answer.completions[0].text
    elsewhere = replace(config(tmp_path), stages=(rl.Custom(path="not_here.py:stage"),))
    report = rl.evaluate(tmp_path / "run", elsewhere, val_data=ROWS, grader=again)
    assert report["num_samples"] == {"val_data": 16}
    assert (rl.export(tmp_path / "run", tmp_path / "out") / "model.safetensors").is_file()


# ------------------------------------------------------------------------- objects


def test_a_function_is_taken_wherever_a_reward_is():
    """Fault 31: it was refused by accident."""

    def grade(completions):
        return [1.0 for _ in completions]

    made = rl.RewardConfig(functions=(grade, rl.ExactAnswer()))  # pyright: ignore
    assert isinstance(made.functions[0], Given) and made.functions[0].function is grade
    with pytest.raises(ValueError, match="expected one of exact_answer"):
        rl.RewardConfig(functions=(rl.ExactAnswer,))  # pyright: ignore


def test_a_function_that_cannot_be_sent_is_refused(tmp_path):
    bad = from_a_notebook("def grade(completions):\n    return lock", lock=threading.Lock())
    with pytest.raises(ValueError, match="function grade cannot be sent .*my_file.py:my_function"):
        rl.train(config(tmp_path), rewards=[bad], train_data=ROWS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the rows are empty"),
        (["1+1="], "the first row is of type str; give one dict a row"),
    ],
)
def test_rows_that_are_no_rows(tmp_path, rows, message):
    with pytest.raises(rl.ConfigError, match=message):
        rl.train(config(tmp_path), rewards=[rl.ExactAnswer()], train_data=rows)


def test_a_callback_that_is_no_function_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(rl.ConfigError, match=r"callbacks=\[3\]: expected functions"):
        rl.train(config(tmp_path), callbacks=[3])  # pyright: ignore[reportArgumentType]


def test_a_run_without_objects_names_what_is_missing(tmp_path):
    with pytest.raises(rl.ConfigError, match="neither functions nor a model"):
        rl.train(config(tmp_path), train_data=ROWS)
    with pytest.raises(rl.ConfigError, match="no training data"):
        rl.train(config(tmp_path), rewards=[rl.ExactAnswer()])


def test_a_digest_is_of_the_source_of_a_function():
    base = "def grade(x, *, a=1):\n    return x + 2"
    one, same, other = (from_a_notebook(text) for text in (base, f"# b\n{base}", f"{base}0"))
    assert function_digest(one) == function_digest(same) != function_digest(other)
    assert function_digest(partial(one, a=2)) not in map(function_digest, (one, partial(one, a=3)))
    code = "class G:\n    def __call__(self, x): return {0}\ngrade = G()"
    one, same, other = map(function_digest, [from_a_notebook(code.format(i)) for i in (1, 1, 2)])
    assert one == same != other


def test_rows_of_another_kind():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    made = rl.DataConfig(train_rows=data).train_rows
    assert made is not None and (made.num_rows, made.digest) == (16, rows_digest(ROWS))


def test_rows_of_grain():
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(ROWS[::-1])[::-1]
    made = rl.DataConfig(train_rows=data).train_rows
    assert made is not None and (made.num_rows, made.digest) == (16, rows_digest(ROWS))
    changes = {"data.train_tasks": [], "warmup": None}
    of_grain, of_list = (
        load_run_prompts(made, train_sources(made), CharTokenizer(), None)
        for made in (rl.load_config("grpo", changes | {"data.train_rows": x}) for x in (data, ROWS))
    )
    assert [x.token_ids for x in of_grain] == [x.token_ids for x in of_list] != []


def measured(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run that no clock decides."""
    clocks = ("timing", "perf/", "throughput")
    rows = read_jsonl(folder / "run" / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]


@pytest.mark.nightly
def test_weights_of_a_program(tmp_path):
    """The same run from our layout and from Hugging Face's names; a resume wants the same."""
    import jax
    import numpy as np

    from jaxrl_llm.models.base import init_params, model_spec
    from jaxrl_llm.models.families import config_from_hf, hf_names

    settings = config(tmp_path).actor.hf_config | {"vocab_size": CharTokenizer().vocab_size}
    spec = model_spec(config_from_hf(settings))
    ours = init_params(spec, jax.random.key(3))
    leaves = {tuple(k.key for k in path): x for path, x in jax.tree.leaves_with_path(ours)}
    names = hf_names(spec.config, "causal_lm")
    theirs = {t.name: np.asarray(t.to_hf(leaves[path])) for path, t in names.items()}
    for name, params in {"ours": ours, "theirs": theirs, "none": None}.items():
        run = config(tmp_path / name, total_steps=1, save_every=1, reward=EXACT)
        rl.train(run, train_data=ROWS, params=params)
    assert measured(tmp_path / "ours") == measured(tmp_path / "theirs")
    assert measured(tmp_path / "ours") != measured(tmp_path / "none")
    assert all(not x.is_deleted() for x in jax.tree.leaves(ours))

    more = config(tmp_path / "ours", total_steps=2, save_every=1, reward=EXACT)
    other = jax.tree.map(lambda x: x * 2, ours)
    for wrong in (other, None):
        with pytest.raises(rl.ConfigError, match="actor.params"):
            rl.train(more, train_data=ROWS, params=wrong)
    with pytest.raises(rl.ConfigError, match=r"rl.train\(config, params=weights\) gives them"):
        rl.load_config(tmp_path / "ours" / "run" / "config.json", {"data.train_rows": ROWS})
    assert rl.train(more, train_data=ROWS, params=ours).step == 2
    with pytest.raises(ValueError, match="missing are 'model.norm.weight', unexpected 'x'"):
        theirs["x"] = theirs.pop("model.norm.weight")
        rl.train(config(tmp_path / "wrong", reward=EXACT), train_data=ROWS, params=theirs)


GRAIN = """
import os, signal, sys
import grain
from pathlib import Path
import jaxrl_llm as rl
from test_library import EXACT, ROWS, config

def kill(report):
    if report.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

data = grain.MapDataset.source(ROWS).shuffle(seed=1).map(dict).to_iter_dataset()
if __name__ == "__main__":
    run = config(Path(sys.argv[1]), save_every=2, reward=EXACT)
    rl.train(run, train_data=data, callbacks=[kill])
"""


@pytest.mark.nightly
def test_a_killed_run_on_rows_of_grain_goes_on(tmp_path, monkeypatch):
    """One over a MapDataset that nobody kills has the same bits as one over its IterDataset."""
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(ROWS).shuffle(seed=1).map(dict)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rl.train(config(whole, save_every=2, reward=EXACT), train_data=data)
    (tmp_path / "mine.py").write_text(GRAIN)
    paths = os.pathsep.join([str(ROOT / "tests"), str(Path(__file__).parent)])
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "mine.py"), str(killed)],
        env=os.environ | {"PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "8"},
        timeout=300,
    )
    assert ended.returncode == -signal.SIGKILL
    run = config(killed, save_every=2, reward=EXACT)
    with pytest.raises(rl.ConfigError, match="data.train_rows.digest"):
        rl.train(run, train_data=data.shuffle(seed=2))
    assert rl.train(run, train_data=data.to_iter_dataset()).step == 4
    assert measured(killed) == measured(whole)


@pytest.mark.nightly
def test_a_callback_may_change_the_working_directory(tmp_path, monkeypatch):
    """The rest of a run whose folder is relative was written elsewhere, or could not be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    run = config(Path("run"), save_every=1, reward=EXACT)
    summary = rl.train(run, train_data=ROWS, callbacks=[lambda _: os.chdir(tmp_path / "elsewhere")])
    assert summary.run_dir == tmp_path / "run" / "run"
    assert len(read_jsonl(summary.run_dir / "metrics.jsonl")) == 5
    assert summary.checkpoint == summary.run_dir / "checkpoints" / "global_step_4"
    assert not (summary.run_dir / "run.lock").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
