"""Whole offline runs of seconds: they learn, resume, export; what cannot work is refused."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_iteration import random_params
from tiny_run import REPOSITORY, TinyRun, assert_same_bits, read_jsonl

from jaxrl_llm.checkpoint.identity import COLUMNS, HELD_OUT
from jaxrl_llm.config import Config, ConfigError, ModelSettings, load_config
from jaxrl_llm.data.collating import collate_records
from jaxrl_llm.data.run_data import held_out_sources, load_records
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.evaluation.trained_model import export_checkpoint
from jaxrl_llm.learner.offline_losses import weighted_means
from jaxrl_llm.plan.models import find_model, spec_of
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.roles import make_role
from jaxrl_llm.plan.weights import load_params
from jaxrl_llm.supervision.nonfinite import NonFiniteGradients
from jaxrl_llm.supervision.run_folder import METRICS
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.batches import OfflineRecords
from jaxrl_llm.trainer.data import RunData, open_plan_and_data
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.trainer.output import Summary

STEPS = 6


def overrides(algorithm: str) -> dict[str, str]:
    return {
        "algorithm": algorithm,
        "data.truncation": "right",
        "total_steps": str(STEPS),
        "save_every": "3",
        "checkpoint.best_metric": "",
        "log.tensorboard": "false",
        "warmup": "null",
    }


def tiny(folder: Path, algorithm: str, **changes: str) -> Config:
    """The tiny online run of the other tests, as a run of an offline algorithm."""
    run = TinyRun(folder)
    flags = overrides(algorithm) | {"run_dir": str(run.run_dir)}
    flags |= {name.replace("__", "."): value for name, value in changes.items()}
    return load_config(str(folder / "tiny.py"), list(flags.items()))


def run_of(folder: Path) -> TinyRun:
    """What a run left in its folder, to be read."""
    run = TinyRun.__new__(TinyRun)
    run.folder, run.run_dir = folder, folder / "run"
    return run


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRun, Summary]:
    folder = tmp_path_factory.mktemp("dpo")
    summary = train(
        tiny(folder, "dpo", warmup='{"steps": 4, "batch_size": 16}', validation__generate="true")
    )
    return run_of(folder), summary


def test_a_run_learns_and_reports_under_trls_names(dpo):
    run, summary = dpo
    metrics = run.metrics()
    assert list(metrics) == list(range(STEPS + 1))
    first, last = metrics[0], metrics[STEPS]
    np.testing.assert_allclose(first["eval_loss"], np.log(2), rtol=1e-6)  # policy is reference
    assert last["eval_loss"] < first["eval_loss"] - 0.002
    assert last["eval_rewards/accuracies"] > 0.5
    assert {"loss", "grad_norm", "learning_rate", "rewards/margins", "logps/chosen"} <= last.keys()
    assert "val-core/chain_sum_2x1/acc/mean@1" in last
    assert summary.step == STEPS and summary.totals.first["eval_loss"] == first["eval_loss"]
    assert (run.run_dir / "warmup" / "metrics.jsonl").exists()


def test_a_resumed_run_has_the_same_bits(dpo, tmp_path):
    reference, _ = dpo
    run = run_of(tmp_path)
    shutil.copytree(reference.run_dir, run.run_dir)
    shutil.rmtree(run.step_path(STEPS))
    config = load_config(str(reference.folder / "tiny.py"), list(_flags(reference).items()))
    train(replace(config, run_dir=str(run.run_dir)))
    assert run.metrics() == reference.metrics()
    assert_same_bits(run.weights(STEPS), reference.weights(STEPS))


def _flags(run: TinyRun) -> dict[str, str]:
    saved = json.loads((run.run_dir / "config.json").read_text())
    generate = str(saved["validation"]["generate"]).lower()
    warmup = '{"steps": 4, "batch_size": 16}'
    return overrides("dpo") | {"warmup": warmup, "validation.generate": generate}


@pytest.mark.nightly
def test_reference_log_probs_computed_once_give_the_same_run(dpo, tmp_path):
    reference, _ = dpo
    config = load_config(str(reference.folder / "tiny.py"), list(_flags(reference).items()))
    run = run_of(tmp_path)
    train(replace(config, run_dir=str(run.run_dir), precompute_reference=True))
    metrics, expected = run.metrics(), reference.metrics()
    for step, row in expected.items():
        assert metrics[step].keys() == row.keys()
        for name, value in row.items():  # another program: the same to rounding
            np.testing.assert_allclose(metrics[step][name], value, rtol=1e-5, atol=1e-6)
    tables = {path: x for path, x in run.weights(STEPS).items() if path.startswith("frozen")}
    assert len(tables) == 4  # chosen and rejected, of training and held-out pairs; no model
    assert all(x.ndim == 1 for x in tables.values())


@pytest.mark.nightly
def test_a_reference_on_devices_of_its_own_gives_the_same_run(dpo, tmp_path):
    reference, _ = dpo
    config = load_config(str(reference.folder / "tiny.py"), list(_flags(reference).items()))
    run = run_of(tmp_path)
    train(replace(config, run_dir=str(run.run_dir), placement={"reference": "2-3"}))
    metrics, expected = run.metrics(), reference.metrics()
    for step, row in expected.items():
        assert metrics[step].keys() == row.keys()
        # At first policy and reference are equal, and rounding decides which reward is larger.
        kept = [name for name in row if step > 1 or "accuracies" not in name]
        for name, value in ((name, row[name]) for name in kept):
            np.testing.assert_allclose(metrics[step][name], value, rtol=1e-5, atol=1e-6)
    moved = [row["perf/moved_between_groups_gb"] for row in read_jsonl(run.run_dir / METRICS)[1:]]
    assert min(moved) > 0


@pytest.mark.nightly
def test_a_reference_of_another_path_is_what_the_policy_is_compared_with(dpo, tmp_path):
    """The rewards of held-out pairs are beta times the log-ratio of the two models."""
    _, summary = dpo
    flags = {"warmup": "null", "total_steps": "1", "validation__generate": "false"}
    other = str(summary.checkpoint)
    rows = {}
    for name, paths in {
        "one": {"actor__path": other},
        "two": {},
        "both": {"reference__path": other},
    }.items():
        train(tiny(tmp_path / name, "dpo", **flags, **paths))
        rows[name] = run_of(tmp_path / name).metrics()[0]
    for pair in ("chosen", "rejected"):
        gap = rows["two"][f"eval_logps/{pair}"] - rows["one"][f"eval_logps/{pair}"]
        assert abs(gap) > 0.01
        np.testing.assert_allclose(rows["both"][f"eval_rewards/{pair}"], 0.1 * gap, rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changed", [("operators", "+"), pytest.param(("size", "9"), marks=pytest.mark.slow)]
)
def test_a_table_of_the_reference_is_not_taken_for_that_of_other_held_out_records(
    changed, tmp_path
):
    small = {"total_steps": "2", "save_every": "1"}
    small |= {"precompute_reference": "true", "data__val_tasks__0__size": "10"}
    train(tiny(tmp_path, "dpo", **small))
    shutil.rmtree(run_of(tmp_path).step_path(2))
    name, value = changed
    other = small | {f"data__val_tasks__0__{name}": value}
    (run_of(tmp_path).run_dir / "config.json").unlink()  # it would refuse the other data first
    with pytest.raises(ValueError, match="in other data: its held_out_digest is"):
        train(tiny(tmp_path, "dpo", **other))
    (run_of(tmp_path).run_dir / "config.json").unlink(missing_ok=True)
    assert train(tiny(tmp_path, "dpo", **small)).step == 2


def test_a_run_exports_its_model(dpo, tmp_path):
    _, summary = dpo
    export_checkpoint(summary.checkpoint, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert "val-core" in (tmp_path / "hf" / "README.md").read_text()


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    folder = tmp_path_factory.mktemp("reward_model")
    return train(tiny(folder, "reward_model", total_steps="3"))


def test_a_trained_reward_model_is_the_next_runs_reward(reward_model, tmp_path):
    metrics = [json.loads(x) for x in (reward_model.run_dir / "metrics.jsonl").open()]
    assert {"accuracy", "margin", "mean_reward", "eval_accuracy"} <= metrics[-1].keys()
    params = _load(reward_model.checkpoint, "scalar")
    assert np.abs(params["score"]["kernel"]).max() > 0
    with pytest.raises(ValueError, match="no language model to begin from"):
        _load(reward_model.checkpoint, "causal_lm")
    export_checkpoint(reward_model.checkpoint, tmp_path / "hf", role="reward")
    exported = _load(tmp_path / "hf", "scalar")
    jax.tree.map(np.testing.assert_array_equal, exported, params)


def test_a_reward_model_begins_from_a_language_model(dpo):
    """The decoder is the actor's, the head zero, as from a Hugging Face directory."""
    _, summary = dpo
    params = _load(summary.checkpoint, "scalar")
    actor = _load(summary.checkpoint, "causal_lm")
    jax.tree.map(np.testing.assert_array_equal, params["decoder"], actor["decoder"])
    assert not np.asarray(params["score"]["kernel"]).any()


def _load(path: Path, kind: str):
    settings = ModelSettings(path=str(path))
    source = find_model(settings, context=1)
    role = make_role("actor", spec_of(source, kind, settings), settings, make_mesh())
    return jax.tree.map(np.asarray, load_params(role, source, 0))


# ------------------------------------------------------------------------- pairs taken apart


@pytest.mark.nightly
@pytest.mark.parametrize("packed", ["16", pytest.param("0", marks=pytest.mark.slow)])
def test_a_policy_of_kto_is_judged_on_pairs_as_one_of_dpo(packed, tmp_path):
    """The same weights and the same pairs, by both plans: two ways to the same rewards."""
    tokenizer, mesh = load_tokenizer("char"), make_mesh()
    taken_apart = {"actor__micro_batch_tokens": packed}
    config = tiny(tmp_path / "dpo", "dpo", data__train_batch_size="8")
    plans = [
        plan_offline(config, tokenizer, mesh),
        plan_offline(tiny(tmp_path / "kto", "kto", **taken_apart), tokenizer, mesh),
    ]
    pairs = load_records(config, held_out_sources(config), "preferences", tokenizer, None)
    batch = jax.tree.map(jnp.asarray, collate_records(pairs[:5], length=8, pad_id=0, size=8))
    role = plans[0].learner
    params, reference = (random_params(role.spec.params, seed) for seed in (1, 2))
    states = {"actor": role.state(jax.tree.map(jnp.asarray, params)), "reference": reference}
    expected = weighted_means(jax.jit(plans[0].held_out)(states, batch))
    found = weighted_means(jax.jit(plans[1].held_out_pairs)(states, batch))
    assert 0 < found["rewards/accuracies"] < 1 and found["rewards/margins"] != 0
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_run_of_kto_reports_what_its_policy_makes_of_held_out_pairs(tmp_path):
    train(tiny(tmp_path, "kto", total_steps="3", actor__micro_batch_tokens="16"))
    metrics = run_of(tmp_path).metrics()
    assert metrics[0]["eval_rewards/accuracies"] == 0.0  # the policy is its own reference
    assert 0 < metrics[3]["eval_rewards/accuracies"] <= 1
    assert {"eval_accuracy", "eval_kl", "eval_rewards/margins"} <= metrics[3].keys()
    assert "rewards/accuracies" not in metrics[3]  # a batch of training has no pairs


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["kto", "sft", "reward_regression", "orpo"])
def test_other_kinds_of_records_run(algorithm, tmp_path):
    packed = {"actor__micro_batch_tokens": "16"} if algorithm in ("kto", "sft") else {}
    train(tiny(tmp_path, algorithm, total_steps="20", **packed))
    metrics = run_of(tmp_path).metrics()
    assert metrics[20]["eval_loss"] < metrics[0]["eval_loss"]


@pytest.mark.slow
def test_orpo_learns_from_chance(tmp_path):
    """The config as a user runs it: nothing is warmed up, so the start is a coin."""
    file, run_dir = REPOSITORY / "configs" / "orpo.py", tmp_path / "run"
    config = load_config(str(file), [("run_dir", str(run_dir))])
    totals = train(replace(config, total_steps=150)).totals
    assert totals.first["eval_rewards/accuracies"] < 0.55
    assert totals.last["eval_rewards/accuracies"] > 0.7


@pytest.mark.slow
def test_kill_9_and_sigterm_leave_no_mark(tmp_path):
    """In processes of their own, as a user starts them: killed, terminated, and left alone."""
    flags = [f"--config.{name}={value}" for name, value in overrides("kto").items()]
    flags += ["--config.total_steps=40", "--config.checkpoint.keep_latest=1"]
    reference, run = (TinyRun(tmp_path / name, *flags) for name in ("reference", "run"))
    reference.finish()
    run.kill_when(run.step_path(6).exists)
    with run.process() as process:
        run.wait_for(run.step_path(15).exists, process)
        process.terminate()
        assert process.wait(60) in (0, 130)
    run.finish()
    assert run.metrics() == reference.metrics()
    assert_same_bits(run.weights(40), reference.weights(40))
    best = min(reference.metrics().items(), key=lambda item: item[1].get("eval_loss", np.inf))
    assert best[0] == 0 or best[0] in run.saved_steps()


@pytest.mark.slow
def test_bad_gradients_stop_the_run_and_name_a_parameter(tmp_path):
    config = tiny(tmp_path, "sft", actor__optimizer__learning_rate="1e30")
    with pytest.raises(NonFiniteGradients, match=r"decoder\.embed"):
        train(config)


# ------------------------------------------------------------------------- refusals


def refused(folder: Path, algorithm: str, **changes: str) -> None:
    config = tiny(folder, algorithm, **changes)
    other = {role: make_mesh(devices=jax.devices()[1:2]) for role in config.placement}
    plan_offline(config, load_tokenizer("char"), make_mesh(), role_meshes=other)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("dp", {}, "did you mean 'dpo'"),
        ("dpo", {"algorithm__betta": "0.1"}, "beta"),
        ("dpo", {"mesh__data": "3"}, "multiples of 3 work"),
        ("dpo", {"actor__micro_batch_size": "5"}, "must divide the 16 samples"),
        ("dpo", {"warmup": '{"stop_at": 0.5}'}, "validation.generate=true"),
    ],
)
def test_a_bad_config_is_refused_before_jax(algorithm, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tiny(tmp_path, algorithm, **changes)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("dpo", {"actor__micro_batch_tokens": "64"}, "packing could part the rows"),
        ("kto", {"data__train_batch_size": "1"}, "64 works"),
        ("kto", {"precompute_reference": "true"}, "cannot be computed before"),
        ("reward_model", {"warmup": "{}"}, "config.actor.path"),
        ("simpo", {"reference__path": str(REPOSITORY)}, "reads no reference; leave it out"),
        ("simpo", {"placement": "{reference: 1}"}, "reads no reference, and its devices"),
        ("kto", {"placement": "{reference: 1}"}, "judges held-out pairs"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(algorithm, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        refused(tmp_path, algorithm, **changes)


LABELLED = [("1+1=", "2", True), ("2+3=", "4", False), ("3-2=", "1", True)]


def opened_data(folder: Path, algorithm: str, **changes: str) -> RunData:
    """The data of a run that is planned, before any weights are made."""
    config = tiny(folder, algorithm, **changes)
    with ExitStack() as stack:
        tokenizer, mesh, run_dir = load_tokenizer("char"), make_mesh(), Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        return open_plan_and_data(config, tokenizer, {"actor": mesh}, run_dir, stack)[1]


def opened(folder: Path, algorithm: str, **changes: str) -> OfflineRecords:
    """The records of a run of `opened_data`."""
    records = opened_data(folder, algorithm, **changes).records
    assert records is not None
    return records


def labelled_file(folder: Path, number: int) -> str:
    columns = ("prompt", "completion", "label")
    rows = [dict(zip(columns, row, strict=True)) for row in LABELLED[:number]]
    file = folder / "labelled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"[{file}]"


@pytest.mark.parametrize("split", ["train", "val"])
def test_one_record_that_nothing_can_be_mismatched_with_is_refused(split, tmp_path):
    files = {f"data__{split}_files": labelled_file(tmp_path, 1), f"data__{split}_tasks": "[]"}
    with pytest.raises(ValueError, match=f"config.data.{split}_files .* 2 records or more work"):
        opened(tmp_path, "kto", **files)
    opened(tmp_path, "kto", **files | {f"data__{split}_files": labelled_file(tmp_path, 2)})


@pytest.mark.parametrize("algorithm", ["kto", "grpo"])
def test_rows_that_are_held_out_and_trained_on_are_named(algorithm, tmp_path, caplog):
    """A resume compares what else of the rows may change."""
    file = labelled_file(tmp_path, 3)
    files = {"data__train_files": file, "data__val_files": file}
    files |= {"data__train_tasks": "[]", "data__val_tasks": "[]"}
    if algorithm == "grpo":
        files |= {"data__columns": "{ground_truth: completion}", "warmup": "null"}
    data = opened_data(tmp_path, algorithm, **files)
    assert data.digests.keys() == ({HELD_OUT} if algorithm == "kto" else {HELD_OUT, COLUMNS})
    assert "3 of 3 held-out rows are training rows too" in caplog.text


def test_held_out_records_are_compared_where_their_prompts_are_answered_too(tmp_path):
    """Before, the digest was of the prompts alone."""
    files = {"data__val_files": labelled_file(tmp_path, 3), "data__val_tasks": "[]"}
    files |= {"validation__generate": "true"}
    file, found = tmp_path / "labelled.jsonl", []
    with_answers = file.read_text().replace("}", ', "ground_truth": "2"}')
    for text in (with_answers, with_answers.replace("false", "true")):
        file.write_text(text)
        found.append(opened_data(tmp_path, "kto", **files).digests[HELD_OUT])
    assert found[0] != found[1]


def test_held_out_records_that_leave_one_over_are_each_mismatched_with_another(tmp_path):
    files = {"data__val_files": labelled_file(tmp_path, 3), "data__val_tasks": "[]"}
    records = opened(tmp_path, "kto", data__train_batch_size="2", **files)
    batches = list(records.held_out_batches())
    assert [batch.weights.tolist() for batch in batches] == [[1, 1], [1, 0]]
    index = [int(i) for batch in batches for i in batch.index[batch.weights > 0]]
    assert index == [0, 1, 2]  # of the shuffled records
    mismatched = [row for batch in batches for row in batch.mismatched.tokens[batch.weights > 0]]
    tokens = [record.rows["completion"].token_ids for record in records.held_out]
    for i, lent in enumerate((1, 0, 1)):
        expected = (*tokens[i][:4], *tokens[lent][4:])
        assert tuple(mismatched[i][: len(expected)]) == expected
    assert len({row[4:] for row in tokens}) == 3


JUDGED = """
from jaxrl_llm.algorithms.offline import OfflineAlgorithm
from jaxrl_llm.algorithms.preference_losses import judged_pairs


def labelled() -> OfflineAlgorithm:
    def loss(completion_logprobs, reference_completion_logprobs, labels):
        return (completion_logprobs - reference_completion_logprobs) * labels, {}

    return OfflineAlgorithm(loss=loss, judge_pairs=judged_pairs)
"""


def test_pairs_cannot_be_judged_by_a_reference_that_was_dropped(tmp_path):
    (tmp_path / "judged.py").write_text(JUDGED)
    judged = f"{{kind: custom, path: {tmp_path}/judged.py:labelled, offline: true}}"
    with pytest.raises(ValueError, match="the reference model judges held-out pairs"):
        refused(tmp_path, judged, precompute_reference="true")
    refused(tmp_path, judged)  # with its reference it is planned
