"""A run with adapters: what its checkpoints hold, an exact resume, the base, and its exports."""

import json

import jax
import numpy as np
import pytest
from test_run import config_of
from tiny_run import assert_same_bits

from jaxrl_llm.checkpoint import layout
from jaxrl_llm.checkpoint.peft import CONFIG, import_adapter, read_lora
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.base import merge_adapters, model_spec
from jaxrl_llm.models.lora import join
from jaxrl_llm.trainer.answering import open_model
from jaxrl_llm.trainer.run import train
from jaxrl_llm.trainer.trained_model import export_checkpoint

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


def test_exports(tmp_path, base, trained):
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


def test_a_warm_up_trains_the_base_which_is_saved_once(tmp_path):
    run, config = config_of(tmp_path, **GRPO | {"total_steps": "1"})
    checkpoint = train(config).checkpoint
    frozen = [n for n in run.weights(1) if n.startswith("frozen")]
    assert frozen and all("['base']" in name for name in frozen)
    assert open_model(layout.find_model_path(str(checkpoint))).spec.lora is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"mesh.pipeline": "2", "actor.hf_config.num_hidden_layers": "2"},
            "mesh.pipeline=2: set mesh.pipeline to 1",
        ),
        ({"placement": '{"rollout": "1"}'}, "does not work with config.placement"),
        ({"actor.lora.merge": "false", "actor.lora.dora": "true"}, "lora.dora=True"),
        ({"actor.lora.targets": "[]"}, "lora.targets is empty"),
        ({"actor.lora.rank": "0", "actor.base_dtype": "bfloat16"}, "base_dtype=bfloat16 is of"),
        ({"actor.lora.path": "nowhere"}, "expected a folder with adapter_config.json"),
        ({"critic.lora.rank": "2", "critic.tensor": "1", "mesh.tensor": "2"}, "critic.tensor=1"),
    ],
)
def test_what_does_not_work_is_refused(tmp_path, flags, message):
    given = {name.replace(".", "__"): value for name, value in flags.items()}
    given = {"algorithm": '{"kind": "grpo"}', "actor__lora__rank": "2"} | given
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, **given)
