"""A run with adapters: what its checkpoints hold, an exact resume, the base, and its exports."""

import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file
from test_run import config_of
from tiny import model_config
from tiny_run import assert_close, assert_same_bits

from jaxrl_llm.checkpoint import layout
from jaxrl_llm.checkpoint.huggingface import load_model_config
from jaxrl_llm.checkpoint.peft import CONFIG, WEIGHTS, import_adapter, read_lora
from jaxrl_llm.config import ActorConfig, ConfigError, LoraConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.evaluation import answering
from jaxrl_llm.evaluation.answering import open_model
from jaxrl_llm.evaluation.trained_model import evaluate, export_checkpoint
from jaxrl_llm.launch.commands import export
from jaxrl_llm.launch.dry_run import dry_run
from jaxrl_llm.models.base import frozen_spec, merge_adapters, model_spec
from jaxrl_llm.models.frozen import quantized_as
from jaxrl_llm.models.lora import join, split
from jaxrl_llm.plan.models import ModelSource, adapters_of, find_model, learner_spec
from jaxrl_llm.plan.roles import make_role, strict_of
from jaxrl_llm.plan.weights import first_adapters, load_params
from jaxrl_llm.trainer import states
from jaxrl_llm.trainer.loop import train

pytestmark = pytest.mark.nightly

GRPO = {
    "algorithm": '{"kind": "grpo"}',
    "actor__lora": '{"rank": 2, "alpha": 8}',
    "checkpoint__asynchronous": "false",
    "save_every": "1",
    "checkpoint__keep_latest": "9",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face folder of the tiny model."""
    folder = tmp_path_factory.mktemp("base")
    _, config = config_of(folder, algorithm='{"kind": "grpo"}')
    return export_checkpoint(train(config).checkpoint, folder / "model")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base):
    """A run of two steps with adapters on that model."""
    run, config = config_of(
        tmp_path_factory.mktemp("run"),
        actor__path=str(base),
        total_steps="2",
        warmup="null",
        **GRPO,
    )
    return run, train(config).checkpoint


def test_a_checkpoint_holds_adapters_alone_and_resumes_exactly(tmp_path, base, trained):
    run, last = trained
    found = run.weights(2)
    assert not (last.parent / layout.FROZEN).exists()
    arrays = [name for name, x in found.items() if name.startswith("actor") and x.ndim]
    assert arrays and all("adapter" in name for name in arrays)
    flags = {"actor__path": str(base), "total_steps": "2", "warmup": "null"} | GRPO
    again, config = config_of(tmp_path, resume=str(run.step_path(1)), **flags)
    train(config)
    assert_same_bits(again.weights(2), found)


def test_a_run_of_two_stages_goes_on_on_one_device(tmp_path):
    layers = {"actor__hf_config__num_hidden_layers": "2", "total_steps": "2", "warmup": "null"}
    flags = GRPO | layers | {"algorithm": '{"kind": "sft"}'}
    scanned = {"mesh__pipeline": "2", "actor__scan_layers": "true"}
    stages, config = config_of(tmp_path / "stages", **scanned, **flags)
    train(config)
    one, config = config_of(tmp_path / "one", resume=str(stages.step_path(1)), **flags)
    train(config)
    found, expected = one.metrics()[2], stages.metrics()[2]
    assert expected.pop("pipeline_bubble") == pytest.approx(1 / 3)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights, of_stages = one.weights(2), stages.weights(2)
    assert weights.keys() == of_stages.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(value, of_stages[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_adapters_of_experts_resume_exactly_and_merge(tmp_path):
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 16, "vocab_size": 96}
    changes = {f"actor.hf_config.{key}": json.dumps(value) for key, value in experts.items()}
    flags = {"total_steps": "2", "warmup": "null"} | GRPO | changes
    run, config = config_of(tmp_path / "one", **flags)
    last = train(config).checkpoint
    found = run.weights(2)
    assert [name for name in found if "gate" in name and "adapter" in name]
    again, config = config_of(tmp_path / "two", resume=str(run.step_path(1)), **flags)
    train(config)
    assert_same_bits(again.weights(2), found)
    out = export_checkpoint(last, tmp_path / "merged")
    assert load_model_config(out).mixture.num_experts == 4


def test_the_frozen_weights_must_be_those_of_the_adapters(tmp_path, base, trained):
    run, _ = trained
    other = export_checkpoint(run.step_path(0), tmp_path / "other")
    merged = export_checkpoint(run.step_path(2), tmp_path / "merged")
    same = {"total_steps": "3", "warmup": "null"} | GRPO
    # New adapters change nothing, so this is another copy of the base.
    _, config = config_of(
        tmp_path / "a", resume=str(run.step_path(1)), actor__path=str(other), **same
    )
    train(config)
    _, config = config_of(
        tmp_path / "b", resume=str(run.step_path(1)), actor__path=str(merged), **same
    )
    with pytest.raises(ConfigError, match=rf"'base' are not.*{merged} now, {base} then.*kernel"):
        train(config)


def test_other_adapters_are_refused_by_name(tmp_path, base, trained):
    run, _ = trained
    flags = {"actor__path": str(base), "warmup": "null"} | GRPO
    flags["actor__lora"] = '{"rank": 3, "alpha": 8}'
    with pytest.raises(ConfigError, match=r"actor.lora.rank 2 there, 3 now"):
        train(config_of(tmp_path, resume=str(run.step_path(1)), **flags)[1])


def test_an_adapter_of_other_shapes_is_refused_before_weights(tmp_path, base, trained, monkeypatch):
    folder = export_checkpoint(trained[1], tmp_path / "adapter", adapter=True)
    written = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(written | {"r": 5}))
    flags = {"actor__path": str(base), "warmup": "null"} | GRPO
    flags["actor__lora"] = json.dumps({"path": str(folder)})
    config = config_of(tmp_path, **flags)[1]

    def load(*_):
        raise AssertionError("weights were loaded first")

    monkeypatch.setattr(states, "load_params", load)
    for start in (dry_run, train):
        with pytest.raises(ConfigError, match=r"has shape \(2, .* the model wants \(5, "):
            start(config)


@pytest.fixture
def separate(monkeypatch):
    """Open models keep their projections apart, as adapters have them."""
    monkeypatch.setattr(answering, "_merged", lambda spec, params: (spec, params))


def test_exports(tmp_path, base, trained, separate):
    run, last = trained
    merged = export_checkpoint(last, tmp_path / "merged")
    folder = export_checkpoint(last, tmp_path / "adapter", adapter=True)
    assert json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] == str(base)
    found, original, of_run = (
        open_model(layout.find_model_path(str(path))) for path in (merged, base, last)
    )
    config = original.spec.config
    spec = model_spec(
        config, lora=read_lora(folder, config, "causal_lm", dtype="float32", dropout=0)
    )
    own = import_adapter(folder, spec)
    expected = jax.jit(lambda own, base: merge_adapters(spec, join(base, own))[1])(
        own, original.params
    )
    moved = 0.0
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        for each in (found, of_run):
            other = each.params
            for entry in path:
                other = other[entry.key]
            np.testing.assert_array_equal(value, other)
        first = original.params
        for entry in path:
            first = first[entry.key]
        moved += float(np.abs(value - first).max())
    assert moved > 0
    for output, adapter in ((folder, False), (merged, True)):
        with pytest.raises(ConfigError, match="would mix the two; give another directory"):
            export_checkpoint(last, output, adapter=adapter)
    export_checkpoint(last, folder, adapter=True)  # over an earlier one
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name, content in ((WEIGHTS, save({"x": np.zeros(2)})), (CONFIG, b"{}"), (WEIGHTS, b"no")):
        (theirs / name).write_bytes(content)
        with pytest.raises(ConfigError, match="holds adapter_.*, which jaxrl_llm did not write"):
            export_checkpoint(last, theirs, adapter=True)
        assert (theirs / name).read_bytes() == content
    with pytest.raises(ConfigError, match="--adapter: all weights of 'actor' learned"):
        export_checkpoint(base.parent / "run/checkpoints/global_step_1", tmp_path, adapter=True)


def test_a_run_goes_on_from_an_adapter_of_peft(tmp_path, base, trained):
    _, last = trained
    folder = export_checkpoint(last, tmp_path / "adapter", adapter=True)
    flags = {"actor__path": str(base), "total_steps": "0", "warmup": "null"} | GRPO
    flags["actor__lora"] = json.dumps({"path": str(folder)})
    run, config = config_of(tmp_path, **flags)
    train(config)
    found = {k: v for k, v in run.weights(0).items() if k.startswith("actor[")}
    of_first = trained[0].weights(2)
    assert_same_bits(found, {k: v for k, v in of_first.items() if k.startswith("actor[")})


def test_an_adapter_of_another_base_is_refused(tmp_path, base, trained, caplog):
    """Its shapes fit, and it would have been trained on as if it belonged to this base."""
    folder = export_checkpoint(trained[1], tmp_path / "adapter", adapter=True)
    other = shutil.copytree(base, tmp_path / "other")
    file = other / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(0.5).tobytes()
    file.write_bytes(data)
    mesh = make_mesh(devices=jax.local_devices()[:1])

    def begin(path):
        lora = LoraConfig(path=str(folder))
        settings = ActorConfig(path=str(path), lora=lora)
        source = find_model(settings, context=1)
        spec = learner_spec(source, "causal_lm", settings)
        role = make_role("actor", spec, settings, mesh)
        dense = frozen_spec(spec.config, "causal_lm", "float32", "float32")
        frozen = load_params(make_role("base", dense, settings, mesh), source, 0)
        first_adapters(role, frozen, settings, seed=0)

    begin(base)
    with pytest.raises(ConfigError, match=rf"trained on other .*path={other}: on {base}\. Give"):
        begin(other)
    # PEFT's own files have no digest, and a name alone is only a hint.
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors, folder / WEIGHTS)
    assert not caplog.records
    begin(other)
    assert f"names the base {base}" in caplog.text


@pytest.fixture(scope="module", params=["float32", pytest.param("float8", marks=pytest.mark.slow)])
def warmed(request, tmp_path_factory):
    """A run of one step whose warm-up trained the base, and the dtype of that."""
    flags = GRPO | {"total_steps": "1", "actor__base_dtype": request.param}
    run, config = config_of(tmp_path_factory.mktemp("warmed"), **flags)
    return request.param, run, train(config).checkpoint


def test_a_warm_up_trains_the_base_which_is_saved_once(tmp_path, warmed):
    dtype, run, checkpoint = warmed
    frozen = {name: x for name, x in run.weights(1).items() if name.startswith("frozen")}
    assert frozen and all("['base']" in name for name in frozen)
    kernels = {str(x.dtype) for name, x in frozen.items() if name.endswith("['kernel']")}
    assert kernels == {"float8_e4m3fn" if dtype == "float8" else dtype}
    assert open_model(layout.find_model_path(str(checkpoint))).spec.lora is None
    # No file holds the base alone: PEFT must not join the adapter to the model before the warm-up.
    folder = export_checkpoint(checkpoint, tmp_path / "adapter", adapter=True)
    assert json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] in ("", None)


def test_a_warm_up_is_not_taken_away_from_a_run_with_adapters(tmp_path, warmed):
    dtype, run, _ = warmed
    flags = GRPO | {"resume": str(run.step_path(1)), "actor__base_dtype": dtype, "warmup": "null"}
    with pytest.raises(ConfigError, match="give the warm-up and the adapters"):
        train(config_of(tmp_path, **flags)[1])


def test_a_base_in_float8_is_read_again_and_exported_dequantised(tmp_path, base, capsys, separate):
    flags = {"actor__path": str(base), "warmup": "null", "actor__base_dtype": "float8"} | GRPO
    run, config = config_of(tmp_path / "run", total_steps="2", **flags)
    last = train(config).checkpoint
    found = run.weights(2)
    assert not (last.parent / layout.FROZEN).exists()
    again, config = config_of(
        tmp_path / "again", total_steps="2", resume=str(run.step_path(1)), **flags
    )
    train(config)
    assert_same_bits(again.weights(2), found)
    other = flags | {"actor__base_dtype": "float32", "resume": str(run.step_path(1))}
    with pytest.raises(ConfigError, match="param_dtype float8 there, float32 now"):
        train(config_of(tmp_path / "other", total_steps="2", **other)[1])

    capsys.readouterr()
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    export([f"--model={last}", f"--output={adapter}", "--adapter"])
    assert "trained on a base in float8" in capsys.readouterr().out
    export([f"--model={last}", f"--output={merged}", "--merge"])
    assert "dequantised weights and the adapter were merged" in capsys.readouterr().out
    theirs = open_model(layout.find_model_path(str(base))).params
    lora = read_lora(adapter, load_model_config(base), "causal_lm", dtype="float32", dropout=0)
    spec = frozen_spec(load_model_config(base), "causal_lm", "float8", "float32", lora)
    frozen = jax.jit(partial(quantized_as, split(spec.params)[0]))(theirs)
    expected = jax.jit(lambda own, base: merge_adapters(spec, join(base, own))[1])(
        import_adapter(adapter, spec), frozen
    )
    for path in (merged, last):
        params = open_model(layout.find_model_path(str(path))).params
        jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1, "targets": (".*head",)}, "lora.dropout=0.1 with an adapter of lm_head"),
        ({"merge": False, "targets": (".*head",)}, "lora.merge=False with an adapter of lm_head"),
    ],
)
def test_patterns_and_folders_are_checked_for_what_they_choose(changes, message):
    settings = ActorConfig(lora=LoraConfig(rank=2, **changes))
    source = ModelSource(config=model_config(tie_word_embeddings=False))
    with pytest.raises(ValueError, match=message):
        adapters_of(source, "causal_lm", settings)


def test_strict_runs_merge_projections_alone():
    for targets, fits in ((("all-linear",), True), (("q_proj", ".*head"), False)):
        settings = ActorConfig(lora=LoraConfig(rank=2, targets=targets))
        source = ModelSource(config=model_config(tie_word_embeddings=False))
        spec = learner_spec(source, "causal_lm", settings)
        if fits:
            strict_of(spec, "float32", "auto")
        else:
            with pytest.raises(ValueError, match="merged adapters of projections alone"):
                strict_of(spec, "float32", "auto")


def test_an_adapter_whose_beginning_changed_the_base_is_refused(tmp_path, base, trained):
    folder = export_checkpoint(trained[1], tmp_path / "adapter", adapter=True)
    theirs = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(theirs | {"init_lora_weights": "pissa"}))
    config = load_model_config(base)
    with pytest.raises(ConfigError, match="init_lora_weights=pissa, which is not supported"):
        read_lora(folder, config, "causal_lm", dtype="float32", dropout=0)


def test_an_adapter_alone_is_not_evaluated(tmp_path, base, trained):
    folder = export_checkpoint(trained[1], tmp_path / "adapter", adapter=True)
    lora = {"actor__path": str(base), "actor__lora__path": str(folder)}
    with pytest.raises(ConfigError, match="an adapter alone is not evaluated"):
        evaluate(config_of(tmp_path, **GRPO | lora)[1])


def test_an_adapter_with_a_number_that_is_none_is_refused(tmp_path, base, trained):
    folder = export_checkpoint(trained[1], tmp_path / "adapter", adapter=True)
    file = folder / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    file.write_bytes(data)
    with pytest.raises(ValueError, match="not finite|NaN"):
        lora = {"actor__path": str(base), "warmup": "null", "actor__lora__path": str(folder)}
        train(config_of(tmp_path, **GRPO | lora)[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"actor.lora.merge": "false", "actor.lora.dora": "true"}, "lora.dora=true"),
        ({"actor.lora.targets": "[]"}, "lora.targets: it is empty"),
        (
            {"actor.lora.rank": "0", "actor.base_dtype": "bfloat16"},
            "=bfloat16 .*: no weights are frozen",
        ),
        (
            {"actor.lora.rank": "0", "actor.base_dtype": "float8"},
            "base_dtype=float8 does .*: no weights are frozen",
        ),
        ({"actor.lora.path": "nowhere"}, "expected a folder with adapter_config.json"),
        (
            {"actor.lora.path": "."},
            "expected a folder with adapter_config.json, as PEFT or jaxrl export writes it",
        ),
        ({"critic.lora.rank": "2", "critic.tensor": "1", "mesh.tensor": "2"}, "critic.tensor=1"),
        ({"critic.lora.rank": "2", "critic.base_dtype": "bfloat16"}, "base_dtype=bfloat16: the"),
    ],
)
def test_what_does_not_work_is_refused(tmp_path, flags, message):
    given = {name.replace(".", "__"): value for name, value in flags.items()}
    given = {"algorithm": '{"kind": "grpo"}', "actor__lora__rank": "2"} | given
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, **given)
