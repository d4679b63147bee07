"""Benchmarks on the CPU: whole commands, profiles, and checks that find what was made wrong."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks import (
    attention,
    baseline,
    command,
    generation,
    records,
    roofline,
)
from benchmarks.baseline import run_peers
from benchmarks.harness import run_cases
from benchmarks.options import read_options
from benchmarks.records import Row
from benchmarks.rl_step import rl_step_cases
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import to_hf_config
from jaxrl_llm.models.shapes import SHAPES

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"
TINY = "--shape=tiny"


# ------------------------------------------------------------------------- checks find mistakes


def rows_of(*words: str) -> list[Row]:
    options = read_options([*words, TINY, "--repeats=1"])
    rows = run_cases(
        command._cases(options),
        repeats=1,
        compiler_options={},
        report=lambda row: None,
        profile=options.profile,
    )
    assert rows  # what is asked of all of them would be true of none
    return rows


@pytest.mark.parametrize(
    ("row", "factor", "message"),
    [(-1, 1.1, "output_error"), (1, np.nan, "output not finite")],  # the second is not compared
)
def test_a_wrong_row_of_attention_is_found(row, factor, message, monkeypatch):
    attention_of = attention.attention
    monkeypatch.setattr(
        attention,
        "attention",
        lambda *qkv, **settings: attention_of(*qkv, **settings).at[row].multiply(factor),
    )
    rows = rows_of("attention", "--workload=dense", "--batch=8x32")
    assert all(message in row.error for row in rows), rows


def test_wrong_gradient_of_attention_is_found(monkeypatch):
    def twice_dv(q, k, v, **settings):
        # The value of v with twice its gradient.
        return attention_of(q, k, 2 * v - jax.lax.stop_gradient(v), **settings)

    attention_of = attention.attention
    monkeypatch.setattr(attention, "attention", twice_dv)
    forward, both = rows_of("attention", "--workload=dense", "--batch=1x32")
    assert not forward.error and "dv_error" in both.error


def test_wrong_logprobs_are_found(monkeypatch):
    right = generation.row_logprobs
    monkeypatch.setattr(generation, "row_logprobs", lambda *a, **k: right(*a, **k) - 0.1)
    (found,) = rows_of("generation", "--workload=fixed", "--batch=1")
    assert "token_mult_prob_error" in found.error


# ------------------------------------------------------------------------- whole commands


@pytest.mark.parametrize(
    ("words", "cases"),
    [
        pytest.param(["generation", "--batch=2"], ["fixed_2", "rl_mix"], marks=pytest.mark.nightly),
        pytest.param(
            ["generation", "--workload=prefill"],
            ["prefill_3", "prefill_uneven_3"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["training", "--workload=mix", "--config.actor.micro_batch_tokens=128"],
            ["update_mix_4x2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["training", "--workload=values", "--batch=2x8"]
            + ["--config.critic.micro_batch_tokens=128"],
            ["values_2x8"],
            marks=pytest.mark.slow,
        ),
        (
            ["attention", "--workload=dense", "--head_dim=8", "--window=9"],
            ["dense_d8_w9_2x64_fwd", "dense_d8_w9_2x64_fwdbwd"],
        ),
        pytest.param(
            ["attention", "--workload=decode", "--cache=float8", "--head_dim=8"],
            ["decode_d8_4x64_float8", "decode_d8_4x64_shared_float8"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["attention"],
            [
                *("dense_2x64_fwd", "dense_2x64_fwdbwd", "packed_1x128_fwd", "packed_1x128_fwdbwd"),
                *("packed_shared_1x128_fwd", "packed_shared_1x128_fwdbwd"),
                *("decode_4x64", "decode_4x64_shared"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_command_measures_every_case(words, cases):
    rows = rows_of(*words)
    assert [row.error for row in rows] == [""] * len(cases)
    assert [row.case for row in rows] == cases
    for found in rows:
        assert found.seconds and min(found.seconds) > 0 and found.checks
        assert all(np.isfinite(value) and value >= 0 for value in found.figures.values())


@pytest.mark.nightly
def test_a_step_is_measured_and_profiled_stage_by_stage(tmp_path):
    words = ["rl_step", "--groups=2x2", "--workload=grpo", f"--profile={tmp_path}"]
    (row,) = rows_of(*words)
    assert (row.case, row.error) == ("grpo_2x2_8+8", "") and row.checks
    assert all(np.isfinite(value) and value >= 0 for value in row.figures.values())
    stages = {name.removeprefix("s ") for name in row.figures if name.startswith("s ")}
    assert stages - set(row.profile) == {
        "compiling",
        "longest program",
        "until compiled",
        "lowering",
        "first step",
        "outside of the stages",
        "reward",  # of the host
    }
    for name, part in row.profile.items():
        assert 0 < part.busy <= part.seconds < 10
        assert any((tmp_path / row.key / name).rglob("*.xplane.pb"))
        assert sum(kernel.calls for kernel in part.kernels) > 1
    text = io.StringIO()
    records.show([row], Console(file=text, width=150))
    largest = row.profile["update_actor"].kernels[0]
    assert "update_actor: " in text.getvalue() and f" {largest.name} " in text.getvalue()
    stored = json.loads(row.to_json({}))["profile"]["update_actor"]["kernels"]
    assert stored[0] == [largest.name, largest.seconds, largest.calls]
    assert len(stored) == len(row.profile["update_actor"].kernels) > records.SHOWN


def test_script_writes_json_lines(tmp_path):
    """Two devices, in a process of its own: the bytes that a device receives are half the model."""
    file = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "layout_switch", TINY, "--devices=2", f"--json={file}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert json.loads(done.stdout) == record
    assert record["case"] == "switch_data1_fsdp2_tensor1" and record["num_devices"] == 2
    assert record["repeats"] == 3 and record["seconds_min"] <= record["seconds"]
    assert record["versions"]["jax"] == jax.__version__ and record["command"].endswith(str(file))
    axes = model_spec(SHAPES["tiny"]).axes
    is_names = lambda x: isinstance(x, tuple)  # noqa: E731
    split = [
        np.prod(shape.shape)
        for names, shape in zip(
            jax.tree.leaves(axes, is_leaf=is_names),
            jax.tree.leaves(model_spec(SHAPES["tiny"]).params),
            strict=True,
        )
        if "embed" in names
    ]
    assert record["figures"]["GB received a device"] == pytest.approx(sum(split) * 2 / 2 / 1e9)


@pytest.mark.slow
def test_your_own_model_and_lengths_are_measured(tmp_path):
    """Prompts of different lengths: every response has its own, the trainer's log-probs agree."""
    (tmp_path / "mine").mkdir()
    hf_config = to_hf_config(dataclasses.replace(SHAPES["tiny"], num_heads=2, vocab_size=200))
    (tmp_path / "mine" / "config.json").write_text(json.dumps(hf_config))
    (tmp_path / "lengths.csv").write_text("9,7\n9,2\n3,4\n3,1\n")
    words = [f"--shape={tmp_path / 'mine'}", f"--lengths={tmp_path / 'lengths.csv'}"]
    for command_name, case in (("generation", "lengths_2x2"), ("training", "update_lengths_2x2")):
        options = read_options([command_name, *words, "--groups=2x2", "--repeats=1"])
        (found,) = run_cases(
            command._cases(options), repeats=1, compiler_options={}, report=lambda row: None
        )
        assert (found.shape, found.case, found.error) == ("mine", case, "")
        tokens = 14 if command_name == "generation" else 14 + 2 * (9 + 3)
        assert found.figures["tokens/s"] == pytest.approx(tokens / found.median)


def test_a_roofline_is_that_of_the_card(monkeypatch):
    """No card whose limits were measured, no roofline."""
    words = ["generation", TINY, "--workload=fixed", "--batch=2", "--prompt=4", "--response=6"]
    (case,) = generation.generation_cases(read_options(words))
    case.steps = case.prefills = np.int32(6)
    assert not [name for name in case.figures(2.0) if "roofline" in name or "fraction" in name]

    slow = roofline.Limits(memory=1e6, matmul=1e8, matmul_float8=2e8, peak=1e9, link=1e6)
    monkeypatch.setattr(roofline, "CARDS", {"H200": roofline.H200, "cpu": slow})
    figures = case.figures(2.0)
    decode = roofline.decode_seconds(SHAPES["tiny"], 4, (6, 6), limits=slow)
    prefill = roofline.prefill_seconds(SHAPES["tiny"], (4, 4), limits=slow)
    devices = case.mesh.size
    assert figures["roofline tokens/s"] == pytest.approx(12 / decode * devices)
    assert figures["fraction of roofline"] == pytest.approx(decode / devices / 2.0)
    assert figures["fraction with prefill"] == pytest.approx((decode + prefill) / devices / 2.0)


def test_peers_are_found_when_scripts_are_apart_from_the_package(tmp_path):
    """The package is imported from elsewhere, as where it is installed."""
    scripts = tmp_path / "scripts"
    shutil.copytree(SCRIPT.parent, scripts)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nif test -f "$1"; then echo "{\\"peer\\": \\"$1\\"}"; fi\n')
    python.chmod(0o755)
    code = (
        "from benchmarks.baseline import run_peers\n"
        "from benchmarks.options import read_options\n"
        f"words = ['training', '--shape=tiny', '--baseline', '--peer_python={python}']\n"
        "print([row.who for row in run_peers(read_options(words))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(scripts)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert str(scripts / "benchmarks" / "peers" / "torch_training.py") in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "micro_batch", "lora"),
    [
        (["--workload=grpo"], 8, None),
        (["--workload=grpo_lora", "--config.actor.micro_batch_tokens=40"], 2, 16),
        (["--workload=grpo_lora", "--config.actor.micro_batch_tokens=112"], 4, 16),
        (["--workload=grpo_lora_apart", "--config.actor.micro_batch_size=4"], 4, 16),
    ],
)
def test_the_peer_of_a_step_has_its_sizes(words, micro_batch, lora, monkeypatch):
    given = {}

    def run(name, work, *, python):
        given.update(work["cases"][0], name=name)
        return [{"peer": "trl", "case": given["case"], "seconds": [2.0]}]

    monkeypatch.setattr(baseline, "_run_peer", run)
    options = read_options(["rl_step", TINY, "--groups=4x2", "--baseline", *words])
    (row,) = run_peers(options)
    (ours,) = rl_step_cases(options)
    assert (given["name"], row.case) == ("trl_step", ours.name)
    sizes = [given[name] for name in ("prompts", "samples", "prompt", "response", "micro_batch")]
    assert sizes == [4, 2, 8, 8, micro_batch]
    assert (given["lora"] and given["lora"]["r"]) == lora
    assert row.figures == {"tokens/s/device": 4 * 2 * (8 + 8) / 2.0}


@pytest.mark.slow
@pytest.mark.torch
def test_peer_of_a_step():
    words = ["rl_step", TINY, "--workload=grpo,grpo_lora", "--repeats=2", "--baseline"]
    plain, adapters = run_peers(read_options(words))
    assert (plain.who, plain.case, adapters.case) == ("trl", "grpo_4x2_8+8", "grpo_lora_4x2_8+8")
    assert len(plain.seconds) == 2 and not adapters.error


@pytest.mark.slow
@pytest.mark.torch
def test_peers_of_training():
    options = read_options(["training", TINY, "--workload=update,mix", "--repeats=2", "--baseline"])
    update, mix = run_peers(options)
    assert (update.who, update.case, mix.case) == ("torch_eager", "update_2x32", "update_mix_4x2")
    assert len(update.seconds) == 2 and update.figures["TFLOP/s"] > 0 and not mix.error
