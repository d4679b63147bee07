"""The benchmarks: sizes and bounds against hand-made answers, the command line."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import HYBRID_EXPERTS

from benchmarks import (
    attention,
    command,
    harness,
    records,
    training,
    workloads,
)
from benchmarks.harness import (
    Case,
    CheckFailed,
    measure,
    most_mult_prob_error,
    relative_error,
    run_cases,
)
from benchmarks.options import read_options
from benchmarks.profile import summarise_cpu, summarise_gpu
from benchmarks.records import Row
from jaxrl_llm.config import ActorConfig, Config, ConfigError
from jaxrl_llm.kernels.gated_delta import (
    scan_kernel,
    step_kernel,
)
from jaxrl_llm.models.flops import (
    attention_flops,
    forward_flops,
    training_flops,
)
from jaxrl_llm.models.shapes import SHAPES, num_parameters

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"
TINY = "--shape=tiny"


# ------------------------------------------------------------------------- sizes and bounds


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-4b", 4_022_468_096),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
    ],
)
def test_parameter_counts_are_the_published_ones(shape, published):
    assert num_parameters(SHAPES[shape]) == published


def test_flops_by_hand():
    tiny = SHAPES["tiny"]
    parameters, layer = num_parameters(tiny), 2 * 4 * 16  # 2 * heads * head_dim
    expected = 2 * parameters * (5 + 3) + tiny.num_layers * layer * (25 + 9)
    assert forward_flops(tiny, (5, 3)) == expected
    assert training_flops(tiny, (5, 3)) == 3 * expected
    untied = dataclasses.replace(tiny, tie_word_embeddings=False)
    assert forward_flops(untied, (5, 3)) == expected  # an embedding that is no head multiplies none
    # 4 B N S^2 H / 2, and 2.5 times as much for the backward pass.
    assert attention_flops(32, 128, (1024,) * 16) == 4 * 16 * 32 * 1024**2 * 128 / 2
    assert attention_flops(4, 8, (7,), backward=True) == 3.5 * attention_flops(4, 8, (7,))
    # Pairs that a window of 3 lets see, the diagonal halved: 7 * 3 - 3 * 3 / 2.
    assert attention_flops(4, 8, (7,), window=3) == 4 * 4 * 8 * (7 * 3 - 3 * 3 / 2)
    assert attention_flops(4, 8, (7,), window=9) == attention_flops(4, 8, (7,))
    # A window of 3 in one layer hides 2^2 of the 5^2, and nothing of the other row.
    local = dataclasses.replace(tiny, sliding_window=(3, *[None] * (tiny.num_layers - 1)))
    assert forward_flops(local, (5, 3)) == expected - layer * 4
    assert training_flops(local, (5, 3)) == 3 * forward_flops(local, (5, 3))
    # A scalar model looks its tokens up in the table, and multiplies them with none but its layers.
    scalar = dataclasses.replace(tiny, vocab_size=2 * tiny.vocab_size)
    assert forward_flops(scalar, (5, 3), "scalar") == forward_flops(tiny, (5, 3), "scalar")
    head = 2 * (tiny.vocab_size - 1) * tiny.hidden_size * (5 + 3)
    assert forward_flops(tiny, (5, 3)) - forward_flops(tiny, (5, 3), "scalar") == head


def test_the_check_of_a_hybrid_has_gradients_where_kernels_run(monkeypatch):
    """On a Hopper card the kernel of a decode step has none."""
    for module in (scan_kernel, step_kernel):
        monkeypatch.setattr(module, "on_hopper", lambda: True)
    delta = dataclasses.replace(HYBRID_EXPERTS.delta, key_dim=64, value_dim=64)
    model = dataclasses.replace(HYBRID_EXPERTS, delta=delta)
    config = Config(actor=ActorConfig(attention="xla"))
    checks = training.Checks(model, config)
    spec = checks._spec("policy")
    fields = jax.eval_shape(checks._fields)
    for run in checks._gradients(spec):
        logprobs, gradient = jax.eval_shape(run, spec.params, fields)
        assert logprobs.shape == fields["mask"].shape
        assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, spec.params)


# ------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "command"),
        (["generate"], "invalid choice"),
        (["generation", "--shape=qwen2.5-2b"], "did you mean 'qwen2.5-"),
        (["generation", "--batch=4x8"], "ROWS, e.g. 64"),
        (["training", "--batch=4"], "ROWSxTOKENS"),
        (["training", "--batch=4x"], "two numbers"),
        (["training", "--workload=rl_mix"], "training has no workload rl_mix"),
        (["training", "--repeats=0"], "1 or more"),
        (["training", "--reapeats=2"], "did you mean '--repeats'"),
        (["training", "--config.actor.rematt=true"], "config.actor.remat"),
        (["training", "--config.actor.ppo_epochs=2"], "--batch"),
        (["attention", "--config.actor.remat=true"], "takes no --config"),
        (["generation", "--config.rollout.temperature=0.5"], "temperature 1"),
        (["generation", "--config.rollout.top_p=0.9"], "rl_step measures filters"),
        (["generation", "--groups=1000x8"], "128x8"),
        (["rl_step", "--batch=4"], "--groups"),
        (["training", "--head_dim=96"], "belongs to attention"),
        (["attention", "--window=64"], "--workload=dense"),
        (["attention", "--workload=dense", "--cache=float8"], "--workload=decode"),
        (["training", "--shape=missing/folder"], "Hugging Face folder or config.json"),
        (["rl_step", "--lengths=missing.csv"], "belongs to generation and training"),
        (["rl_step", "--config.critic.warmup_steps=1"], "actor's updates would be left out"),
        (["training", "--config.actor.lora.rank=8"], "--workload=grpo_lora measures adapters"),
        (["rl_step", "--baseline"], "--workload=grpo or grpo_lora works"),
        (["layout_switch", "--baseline"], "no peer"),
    ],
)
def test_mistakes_are_answered(words, message):
    with pytest.raises(ConfigError, match=message):
        read_options(words)


def test_peers_run_before_jax_is_there():
    code = f"import sys; sys.path.append({str(SCRIPT.parent)!r}); import benchmarks.baseline; "
    code += "print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_compiler_options_are_of_the_kind_that_xla_takes():
    words = ("xla_gpu_enable_triton_gemm=false", "xla_backend_optimization_level=0")
    options = read_options(["generation", TINY, *(f"--compiler_option={word}" for word in words)])
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile(dict(options.compiler_options))
    assert compiled(1.0) == 2.0
    assert dict(options.compiler_options)["xla_gpu_enable_triton_gemm"] is False


def test_your_own_shape_is_read_from_its_folder(tmp_path):
    """Sizes of a config.json written by hand; a folder named like a shape keeps apart from it."""
    folder = tmp_path / "qwen2.5-7b"
    folder.mkdir()
    file = folder / "config.json"
    written = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    file.write_text(json.dumps(written))
    for path in (folder, file):
        options = read_options(["training", f"--shape={path},tiny", "--batch=2x32"])
        assert list(options.shapes) == ["local-qwen2.5-7b", "tiny"]
        model = options.shapes["local-qwen2.5-7b"]
        assert (model.num_layers, model.num_kv_heads, model.vocab_size) == (3, 2, 300)
        assert options.config("local-qwen2.5-7b").actor.hf_config["hidden_size"] == 32
    for text, message in (("{", "describes no model"), ('{"name": "ppo"}', "not supported")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_options(["training", f"--shape={folder}"])


def test_your_own_lengths_are_measured(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("prompt,response\n5,7\n5,2\n\n3,4\n3,1\n")
    words = [TINY, f"--lengths={file}"]
    (mine,) = workloads.generation_workloads(read_options(["generation", *words]), "tiny")
    assert (mine.prompt_lengths, mine.limits, mine.samples) == ((5, 5, 3, 3), (7, 2, 4, 1), 1)
    options = read_options(["generation", *words, "--groups=2x2"])
    (shared,) = workloads.generation_workloads(options, "tiny")
    assert (shared.prompt_lengths, shared.limits, shared.samples) == ((5, 3), (7, 2, 4, 1), 2)
    (update,) = workloads.training_workloads(read_options(["training", *words]), "tiny")
    assert (update.kind, update.lengths) == ("update", (12, 7, 7, 4))
    for text, more, message in (
        ("5,7\n5,x\n", [], "lengths.csv:2: '5,x'"),
        ("5,0\n", [], "PROMPT,RESPONSE"),
        ("", [], "has no line PROMPT,RESPONSE"),
        ("5,7\n4,2\n", ["--groups=1x2"], "share a prompt"),
        ("5,7\n5,2\n5,1\n", ["--groups=1x2"], "has 3 samples; --groups=1x2"),
        ("5,7\n", ["--workload=rl_mix"], "--workload=lengths"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_options(["generation", *words, *more])


# ------------------------------------------------------------------------- measuring


class Sum(Case):
    """A tiny case that fails at a chosen point."""

    benchmark, shape = "test", "none"

    def __init__(self, name, fails="", lowering=0.0):
        self.name, self.fails, self.lowering = name, fails, lowering

    def lower(self):
        if self.fails == "lower":
            raise ValueError("cannot lower")
        time.sleep(self.lowering)
        return {"main": jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct((8,), jnp.float32))}

    def prepare(self, programs):
        self.program, self.x = programs["main"], jnp.arange(8.0)

    def check(self):
        if self.fails == "check":
            raise CheckFailed("wrong")
        return {"error": 0.0}

    def run(self):
        return self.program(self.x)

    def figures(self, seconds):
        return {"calls/s": 1 / seconds}


def test_a_failure_is_reported_and_the_rest_go_on():
    seen = []
    cases = [Sum("a", "lower"), Sum("b", "check"), Sum("c", lowering=0.05)]
    rows = run_cases(cases, repeats=2, compiler_options={}, report=seen.append)
    assert rows == seen
    assert [row.error for row in rows] == ["ValueError: cannot lower", "CheckFailed: wrong", ""]
    assert len(rows[2].seconds) == 2 and rows[2].memory_bytes and rows[2].figures["calls/s"] > 0
    assert rows[2].figures["s compiling"] > rows[2].figures["s lowering"] > 0.05
    assert rows[2].figures["s until compiled"] > rows[2].figures["s lowering"]
    assert not rows[0].seconds and all(not vars(case) for case in cases)
    # What failed its check has a time, which is compared with nothing.
    peer = dataclasses.replace(rows[1], who="peer", error="")
    assert len(rows[1].seconds) == 2 and records.ratios([rows[1], peer]) == {}
    assert records.ratios([dataclasses.replace(rows[1], error=""), peer]) != {}


def test_a_program_too_large_for_the_device_is_not_run(monkeypatch):
    monkeypatch.setattr(harness, "_device_bytes", lambda: 35)
    monkeypatch.setattr(Sum, "prepare", lambda self, programs: pytest.fail("prepared"))
    (row,) = run_cases([Sum("a")], repeats=2, compiler_options={}, report=lambda row: None)
    assert "the program 'main' needs" in row.error and "cache_tokens" in row.error
    assert not row.seconds


def test_short_calls_are_queued():
    calls = []

    def run():
        calls.append(0)
        return jnp.zeros(1)

    assert len(measure(run, repeats=3, min_seconds=0.0)) == 3 and len(calls) == 1 + 3
    calls.clear()
    assert len(measure(run, repeats=2, min_seconds=0.0, warm=True)) == 2 == len(calls)
    calls.clear()
    assert len(measure(run, repeats=2, min_seconds=10.0)) == 2
    assert len(calls) == 2 + 2 * 200


class Slow:
    """A lowered program that takes its time."""

    def compile(self, options):
        time.sleep(0.05)
        return jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile(options)


def test_programs_that_cases_share_count_in_each():
    class Checked(Sum):
        def lower(self):
            return super().lower() | {"check": shared, "other": Slow()}

    shared = Slow()
    rows = run_cases(
        [Checked("a"), Checked("b")], repeats=1, compiler_options={}, report=lambda row: None
    )
    assert all(row.figures["s compiling"] > 0.1 for row in rows), rows


@pytest.mark.parametrize(
    ("shape", "quantization", "most"),
    [
        ("tiny", "none", 1.02),
        ("qwen2.5-1.5b", "none", 1.02),
        ("qwen2.5-1.5b", "float8", 1.5),
        ("qwen2.5-7b", "none", 1.05),
        ("llama-3.1-8b", "none", 1.05),
        ("qwen2.5-14b", "none", 1.0763),  # measured: 1.069
        ("qwen3-30b-a3b", "none", 1.05),
    ],
)
def test_how_far_the_sampler_may_be(shape, quantization, most):
    assert most_mult_prob_error(SHAPES[shape], quantization) == pytest.approx(most, abs=1e-4)


def test_nan_is_an_error():
    x = jnp.array([1.0, 2.0])
    assert relative_error({"a": x * 1.5}, {"a": x}) == pytest.approx(0.5)
    assert np.isnan(relative_error(x * jnp.nan, x))
    assert np.isnan(relative_error(x * 0, x * 0))  # nothing was compared
    with pytest.raises(CheckFailed, match="nan"):
        training.require("error", float("nan"), 1.0)


def kernels_in_ns(profile):
    return {k.name: (pytest.approx(1e9 * k.seconds), k.calls) for k in profile.kernels}


def test_a_profile_of_the_cpu_counts_each_moment_of_a_thread_once():
    """Two threads: a loop of 10 ns with kernels of 3 and 4 inside, and one that overlaps by 2."""
    first = [(0.0, 10.0, "while"), (1.0, 4.0, "gemm"), (5.0, 9.0, "gemm"), (20.0, 21.0, "add")]
    found = summarise_cpu([first, [(8.0, 14.0, "copy")], []])
    assert kernels_in_ns(found) == {"gemm": (7, 2), "copy": (6, 1), "while": (3, 1), "add": (1, 1)}
    assert [kernel.name for kernel in found.kernels] == ["gemm", "copy", "while", "add"]
    assert found.seconds == pytest.approx(21e-9) and found.busy == pytest.approx(15e-9)
    with pytest.raises(RuntimeError, match="no kernel"):
        summarise_cpu([[]])


def test_a_profile_of_the_gpu_counts_each_moment_for_the_first_kernel():
    """A matmul launched 3 ns before its predecessor ends, and one that overlaps two others."""
    spans = [
        (3.0, 14.0, "gemm"),
        (0.0, 6.0, "silu"),
        (20.0, 30.0, "gemm"),
        (21.0, 32.0, "copy"),
        (22.0, 23.0, "add"),
    ]
    found = summarise_gpu(spans)
    assert kernels_in_ns(found) == {"gemm": (18, 2), "silu": (6, 1), "copy": (2, 1), "add": (0, 1)}
    assert found.busy == pytest.approx(26e-9) and found.seconds == pytest.approx(32e-9)
    assert sum(kernel.seconds for kernel in found.kernels) == pytest.approx(found.busy)
    with pytest.raises(RuntimeError, match="no kernel"):
        summarise_gpu([])


def test_a_profile_that_fails_keeps_the_measurement(tmp_path, monkeypatch):
    def broken(folder, run):
        raise RuntimeError("the profiler saw no kernel")

    monkeypatch.setattr(harness, "record", broken)
    (row,) = run_cases(
        [Sum("a")], repeats=2, compiler_options={}, report=lambda row: None, profile=tmp_path
    )
    assert len(row.seconds) == 2 and row.profile_error.startswith("RuntimeError: the profiler")
    assert not row.error and records.ratios([row, dataclasses.replace(row, who="peer")])
    assert "no kernel" in json.loads(row.to_json({}))["profile_error"]
    # A failed check is not forgotten for it.
    (row,) = run_cases(
        [Sum("a", "check")], repeats=2, compiler_options={}, report=print, profile=tmp_path
    )
    assert row.error == "CheckFailed: wrong" and row.profile_error


# ------------------------------------------------------------------------- ratios


def row(who: str, seconds: float, memory: int | None = None, case: str = "update") -> Row:
    return Row(
        benchmark="training",
        shape="tiny",
        case=case,
        who=who,
        seconds=(seconds * 2, seconds, seconds / 2),
        memory_bytes=memory,
    )


def test_ratios_are_ours_over_the_peer():
    failed = Row(benchmark="training", shape="tiny", case="update", who="b", error="no")
    rows = [row("ours", 3.0, 50), row("a", 2.0, 100), failed, row("a", 1.0, case="other")]
    assert records.ratios(rows) == {
        "training/tiny/update/a/time": 1.5,
        "training/tiny/update/a/memory": 0.5,
    }


def test_exit_code_says_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_cases", lambda options: [])
    lines = tmp_path / "rows.jsonl"
    options = read_options(["training", TINY, "--baseline", f"--json={lines}"])
    failed = dataclasses.replace(row("ours", 1.0), error="no")
    assert command.run_command(options, [row("ours", 1.0), row("a", 2.0)]) == 0
    assert command.run_command(options, [failed, row("a", 2.0)]) == command.FAILED
    assert len(lines.read_text().splitlines()) == 4


# ------------------------------------------------------------------------- layouts


def test_packed_layout_by_hand():
    layout = attention._packed_layout([[2, 3], [4]], 6)
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(layout.starts, [[0, 0, 2, 2, 2, 0], [0] * 6])
    assert layout.real == (5, 4) and layout.lengths == (2, 3, 4)


def test_layout_of_groups_by_hand():
    layout = attention._shared_layout([[(2, [1, 2]), (1, [2])], [(3, [1])]], 9)
    np.testing.assert_array_equal(
        layout.segment_ids, [[1, 1, 2, 3, 3, 4, 5, 5, 0], [1, 1, 1, 2, 0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        layout.prefix_ids, [[0, 0, 1, 1, 1, 0, 4, 4, 0], [0, 0, 0, 1, 0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
        layout.starts, [[0, 0, 2, 3, 3, 5, 6, 6, 0], [0, 0, 0, 3, 0, 0, 0, 0, 0]]
    )
    prefixes = [[0, 0]] * 2 + [[0, 2]] * 3 + [[0, 0]] + [[5, 6]] * 2 + [[0, 0]]
    np.testing.assert_array_equal(layout.prefixes[0], prefixes)
    np.testing.assert_array_equal(layout.prefixes[1], [[0, 0]] * 3 + [[0, 3]] + [[0, 0]] * 5)
    # Each sample as long as with its prompt, the first prompt counted once.
    assert layout.real == (8, 4) and layout.lengths == (3, 4, 3, 4) and layout.again == (2,)


def test_groups_fill_rows_and_no_more():
    mix = list(workloads.mix_limits("qwen2.5-7b", 64))
    options = read_options(["attention", "--shape=qwen2.5-7b"])
    (row,) = workloads.packed_groups(options, "qwen2.5-7b", 1, 16384)
    assert [prompt for prompt, _ in row] == [512] * len(row)
    assert all(len(responses) == 8 for _, responses in row[:-1])
    responses = [length for _, responses in row for length in responses]
    assert responses == mix[: len(responses)]
    used = sum(responses) + 512 * len(row)
    following = mix[len(responses)] + 512 * (len(row[-1][1]) == 8)
    assert used <= 16384 < used + following
    with pytest.raises(ConfigError, match="no room for a prompt of 512 .* --batch=ROWSxTOKENS"):
        workloads.packed_groups(options, "qwen2.5-7b", 1, 512)
