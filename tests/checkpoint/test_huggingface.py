"""Hugging Face directories in and out: every tensor bit for bit, every mismatch by name."""

import json
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_images import MODELS
from tiny_models import CONFIGS, random_tensors, tiny_config, write_directory

from jaxrl_llm.checkpoint import huggingface
from jaxrl_llm.checkpoint.huggingface import (
    default_model_card,
    export,
    import_params,
    load_model_config,
    load_model_kind,
    model_directory,
)
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import TRAIN_RULES, shardings
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.families import config_from_hf, to_hf_config
from jaxrl_llm.plan.models import image_model_of_checkpoint, source_at, write_huggingface_files
from jaxrl_llm.tokenizer import CharTokenizer


def stored(directory: Path) -> dict[str, np.ndarray]:
    return {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}


def assert_same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape
        assert left[name].tobytes() == right[name].tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CONFIGS)
def test_round_trip_is_exact(tmp_path, case, dtype):
    config = CONFIGS[case]
    source = write_directory(tmp_path / "source", config, dtype=dtype)
    assert load_model_config(source) == config
    assert load_model_kind(source) == "causal_lm"
    spec = model_spec(config, dtype=dtype)
    params = import_params(source, spec)
    for ours, abstract in zip(jax.tree.leaves(params), jax.tree.leaves(spec.params), strict=True):
        assert ours.shape == abstract.shape and ours.dtype == abstract.dtype

    out = export(tmp_path / "out", spec, params, tokenizer_files_from=source)
    assert_same_bits(stored(source), stored(out))
    assert load_model_config(out) == config
    written = json.loads((out / "config.json").read_text())
    assert written["torch_dtype"] == dtype and written["eos_token_id"] == [1, 5]


def test_layout_by_hand(tmp_path):
    config = CONFIGS["qwen2"]
    source = write_directory(tmp_path / "source", config)
    params = import_params(source, model_spec(config))
    attention, hf = params["decoder"]["layers"]["1"]["attention"], stored(source)
    prefix = "model.layers.1.self_attn"
    q = hf[f"{prefix}.q_proj.weight"]  # row = head * head_dim + i
    assert attention["q"]["kernel"][5, 3, 7] == q[3 * 8 + 7, 5]
    assert attention["q"]["bias"][3, 7] == hf[f"{prefix}.q_proj.bias"][3 * 8 + 7]
    assert attention["k"]["kernel"][5, 1, 7] == hf[f"{prefix}.k_proj.weight"][15, 5]
    assert attention["o"]["kernel"][3, 7, 5] == hf[f"{prefix}.o_proj.weight"][5, 3 * 8 + 7]
    down = params["decoder"]["layers"]["0"]["mlp"]["down"]["kernel"]
    assert down[4, 5] == hf["model.layers.0.mlp.down_proj.weight"][5, 4]


def test_casts_round_to_nearest(tmp_path):
    config = tiny_config()
    source = write_directory(tmp_path / "source", config)
    spec = model_spec(config)
    table = stored(source)["model.embed_tokens.weight"]
    params = import_params(source, model_spec(config, dtype="bfloat16"))
    np.testing.assert_array_equal(
        np.asarray(params["decoder"]["embed"]["table"]), table.astype(ml_dtypes.bfloat16)
    )
    out = export(
        tmp_path / "out",
        spec,
        import_params(source, spec),
        tokenizer_files_from=source,
        dtype="float16",
    )
    assert_same_bits(
        stored(out), {name: value.astype(np.float16) for name, value in stored(source).items()}
    )
    with pytest.raises(ValueError, match="dtype 'int8' is not known"):
        params = import_params(source, spec)
        export(tmp_path / "other", spec, params, tokenizer_files_from=source, dtype="int8")


def test_unsupported_architecture_is_refused_by_name(tmp_path):
    source = write_directory(
        tmp_path / "source", tiny_config(), architectures=["MambaForCausalLM"], model_type="mamba"
    )
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported"):
        load_model_config(source)
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported"):
        import_params(source, model_spec(tiny_config()))


def test_missing_unexpected_misshapen_and_quantised_tensors_are_refused_by_name(tmp_path):
    config = tiny_config()
    spec, good = model_spec(config), random_tensors(config)
    norm = "model.layers.1.input_layernorm.weight"

    def refused(change, message):
        source = write_directory(tmp_path / "source", config, tensors=good | change)
        with pytest.raises(ValueError, match=message):
            import_params(source, spec)

    refused({"model.layers.1.mlp.bias": np.zeros(3)}, r"also holds 'model\.layers\.1\.mlp\.bias'")
    refused({norm: np.ones(47, np.float32)}, rf"tensor '{norm}' .* shape \(47,\) .* \(48,\)")
    refused({norm: np.ones(48, np.int8)}, rf"tensor '{norm}' .* stored as I8")
    del good[norm]
    refused({}, rf"lacks '{norm}'")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path, number, dtype):
    config = tiny_config()
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    tensors = {name: value.astype(kind) for name, value in random_tensors(config).items()}
    norm = tensors["model.layers.1.input_layernorm.weight"]
    norm[7] = min(ml_dtypes.finfo(kind).max, np.finfo(np.float32).max)
    import_params(write_directory(tmp_path, config, tensors=tensors), model_spec(config))
    norm[47] = number
    source = write_directory(tmp_path, config, tensors=tensors)
    message = "tensor 'model.layers.1.input_layernorm.weight' of .*model.safetensors holds NaN"
    with pytest.raises(ValueError, match=message):
        import_params(source, model_spec(config))


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "{absolute}", "a/../../x.safetensors"]
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, name):
    outside = write_directory(tmp_path, tiny_config())
    inside = write_directory(tmp_path / "model", tiny_config())
    (outside / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    name = name.format(absolute=tmp_path / "elsewhere.safetensors")
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ValueError, match="names the weight file .* outside of its folder"):
        import_params(inside, model_spec(tiny_config()))
    index.write_text("[]")
    with pytest.raises(ValueError, match="index.json is not an index of weights"):
        import_params(inside, model_spec(tiny_config()))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_theta": float("nan")}, "config.json has rope_theta=nan, which must be a positive"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_parameters.rope_theta=0.0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor=nan"),
    ],
)
def test_numbers_that_make_no_model_are_refused_by_file_and_key(tmp_path, changes, message):
    source = write_directory(tmp_path, tiny_config(), **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(source)


def test_a_second_copy_of_a_tied_head_is_left_out(tmp_path):
    config = CONFIGS["llama_tied"]
    tensors = random_tensors(config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    source = write_directory(tmp_path / "source", config, tensors=tensors | extra)
    spec = model_spec(config)
    out = export(tmp_path / "out", spec, import_params(source, spec), tokenizer_files_from=source)
    assert_same_bits(stored(out), tensors)
    for head in (np.zeros((3, 2), np.float32), extra["lm_head.weight"] + np.float32(1e-3)):
        write_directory(source, config, tensors=tensors | {"lm_head.weight": head})
        with pytest.raises(ValueError, match="'lm_head.weight' that is not its 'model.embed_tok"):
            import_params(source, spec)


def test_a_broken_directory_is_refused(tmp_path):
    source = write_directory(tmp_path / "source", tiny_config())
    (source / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not json at all")
    with pytest.raises(ValueError, match="cannot be read"):
        import_params(source, model_spec(tiny_config()))
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="does not exist; the weights must be in safetensors"):
        import_params(source, model_spec(tiny_config()))
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_model_config(source)
    with pytest.raises(ValueError, match="config.json does not exist"):
        load_model_config(tmp_path)


def test_an_export_without_room_leaves_the_one_before(tmp_path, monkeypatch):
    """The room of files that it would replace counts."""
    source = write_directory(tmp_path / "source", CONFIGS["llama"])
    spec = model_spec(CONFIGS["llama"])
    params = import_params(source, spec)
    how = {"tokenizer_files_from": source, "dtype": "bfloat16"}
    out = export(tmp_path / "out", spec, params, **how)
    before, size = stored(out), sum(x.nbytes for x in stored(out).values())
    free = SimpleNamespace(free=size // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ValueError, match="needs .* GB free: delete old runs"):
        export(tmp_path / "other", spec, params, **how)
    export(out, spec, params, **how)
    with pytest.raises(ValueError, match="needs .* GB free"):
        export(out, spec, params, **how | {"dtype": "float32"})
    assert (out / "config.json").is_file()
    assert_same_bits(before, stored(out))


def test_sharded_export_with_an_index(tmp_path):
    config = CONFIGS["qwen2_window"]
    source = write_directory(tmp_path / "source", config)
    spec = model_spec(config)
    params = import_params(source, spec)
    limit = 30_000
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=source, max_shard_bytes=limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    original = stored(source)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in original.values())
    for shard in shards:
        held = load_file(out / shard)
        assert sum(v.nbytes for v in held.values()) <= limit
        assert all(index["weight_map"][name] == shard for name in held)
    assert_same_bits(original, stored(out))
    again = import_params(out, spec)
    jax.tree.map(np.testing.assert_array_equal, params, again)

    (out / shards[1]).rename(out / "elsewhere")
    with pytest.raises(ValueError, match=f"{shards[1]} does not exist"):
        import_params(out, spec)
    # exporting once more leaves nothing of the shards behind
    export(out, spec, params, tokenizer_files_from=source)
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]
    index["weight_map"] = dict.fromkeys(index["weight_map"], "elsewhere")
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="holds model.safetensors, and .*index.json of other"):
        import_params(out, spec)


def test_two_files_with_the_same_tensor_are_refused(tmp_path):
    config = tiny_config()
    source = write_directory(tmp_path / "source", config)
    (source / "copy.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    index = {"weight_map": {"a": "model.safetensors", "b": "copy.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is in copy.safetensors and in model.safetensors"):
        import_params(source, model_spec(config))


def test_host_memory_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    config = tiny_config(
        num_layers=6, hidden_size=192, num_heads=6, head_dim=32, intermediate_size=512
    )
    source = write_directory(tmp_path / "source", config)
    sizes = [value.nbytes for value in stored(source).values()]
    largest, total = max(sizes), sum(sizes)
    assert total > 20 * largest

    def on_a_device_with_its_own_memory(shape, sharding, callback, dtype):
        # on the CPU an array may keep numpy's buffer, which would then count as host memory
        return jax.numpy.float32(callback((slice(None),) * len(shape)).sum())

    monkeypatch.setattr(jax, "make_array_from_callback", on_a_device_with_its_own_memory)
    spec = model_spec(config)
    import_params(source, spec)  # compiles and imports what is needed once
    tracemalloc.start()
    try:
        import_params(source, spec)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * largest + 300_000  # a tensor as stored and as placed, and some bookkeeping


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_scalar_model_from_a_language_model(tmp_path, case):
    config = CONFIGS[case]  # untied, whose head is left out, and tied
    source = write_directory(tmp_path / "lm", config)
    spec = model_spec(config, "scalar")
    params = import_params(source, spec)
    assert not np.asarray(params["score"]["kernel"]).any()
    expected = import_params(source, model_spec(config))["decoder"]
    jax.tree.map(np.testing.assert_array_equal, params["decoder"], expected)


@pytest.mark.parametrize("case", CONFIGS)
def test_scalar_model_round_trip(tmp_path, case):
    config = CONFIGS[case]
    source = write_directory(tmp_path / "source", config, "scalar")
    assert load_model_kind(source) == "scalar"
    spec = model_spec(config, "scalar")
    params = import_params(source, spec)
    assert np.asarray(params["score"]["kernel"]).any()
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=source)
    assert_same_bits(stored(source), stored(out))
    hf = json.loads((out / "config.json").read_text())
    assert hf["architectures"][0].endswith("ForSequenceClassification")
    assert len(hf["id2label"]) == 1
    with pytest.raises(ValueError, match="sequence-classification model.*no language-model head"):
        import_params(source, model_spec(config))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_a_critic_that_sees_opens_again(tmp_path, name):
    config = config_from_hf(MODELS[name], images=True)
    language = model_spec(config)
    params = init_params(language, jax.random.key(0))
    source = export(tmp_path / "lm", language, params, tokenizer_files_from=CharTokenizer())
    spec = model_spec(config, "scalar")
    critic = import_params(source, spec)
    assert not critic["score"]["kernel"].any()
    assert_trees_equal({k: params[k] for k in ("decoder", "vision")}, critic, but="score")
    critic = init_params(spec, jax.random.key(1))
    out = export(tmp_path / "critic", spec, critic, tokenizer_files_from=CharTokenizer())
    assert load_model_kind(out) == "scalar" and load_model_config(out, images=True) == config
    assert "score.weight" in stored(out)
    assert_trees_equal(critic, import_params(out, spec))


def assert_trees_equal(left, right, but: str = "") -> None:
    right = {name: part for name, part in right.items() if name != but}
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_classifier_into_several_labels_is_refused(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config, "scalar") | {"score.weight": np.zeros((3, 48), np.float32)}
    source = write_directory(tmp_path / "source", config, "scalar", tensors=tensors)
    with pytest.raises(ValueError, match="score.weight' of .* has shape"):
        import_params(source, model_spec(config, "scalar"))


def test_export_takes_its_tokenizer_from_an_object_or_a_directory(tmp_path):
    spec = model_spec(tiny_config())
    params = import_params(write_directory(tmp_path / "source", spec.config), spec)
    out = export(tmp_path / "a", spec, params, tokenizer_files_from=CharTokenizer())
    assert (out / "tokenizer.json").is_file()
    assert json.loads((out / "generation_config.json").read_text()) == {
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == 0

    (out / "chat_template.jinja").write_text("{{ messages }}")
    (out / "additional_chat_templates").mkdir()
    (out / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    copied = export(
        tmp_path / "b",
        spec,
        params,
        tokenizer_files_from=out,
        generation_config={"eos_token_id": 7, "temperature": 0.5},
        model_card="# mine\n",
    )
    assert (copied / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    assert (copied / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (copied / "additional_chat_templates" / "tools.jinja").is_file()
    assert (copied / "README.md").read_text() == "# mine\n"
    hf = json.loads((copied / "config.json").read_text())
    assert hf["eos_token_id"] == 7 and "temperature" not in hf
    # A folder without generation_config.json names its ends in config.json.
    (out / "generation_config.json").unlink()
    (out / "config.json").write_text(json.dumps(hf | {"eos_token_id": [387, 390]}))
    again = export(tmp_path / "d", spec, params, tokenizer_files_from=out)
    for name in ("generation_config.json", "config.json"):
        assert json.loads((again / name).read_text())["eos_token_id"] == [387, 390]

    with pytest.raises(ValueError, match="would overwrite"):
        export(out, spec, params, tokenizer_files_from=out)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        export(tmp_path / "c", spec, params, tokenizer_files_from=tmp_path)
    assert not (tmp_path / "c").exists()


def test_model_card(tmp_path):
    spec = model_spec(tiny_config())
    card = default_model_card(
        spec,
        base_model="owner/name",
        license_id="apache-2.0",
        description="What it is.",
        facts={"steps": 40},
    )
    front, body = card.removeprefix("---\n").split("\n---\n")
    assert "license: apache-2.0" in front and "base_model: owner/name" in front
    assert "What it is." in body and "| steps | 40 |" in body
    assert f"{spec.num_params:,}" in body and "LlamaForCausalLM" in body


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    spec = model_spec(tiny_config())
    params = import_params(write_directory(tmp_path / "source", spec.config), spec)
    fetched = []
    monkeypatch.setattr(huggingface.multihost, "is_main", lambda: False)
    monkeypatch.setattr(huggingface.multihost, "fetch", lambda x: fetched.append(1) or np.array(x))
    export(tmp_path / "out", spec, params, tokenizer_files_from=CharTokenizer())
    assert len(fetched) == len(jax.tree.leaves(params)) and not (tmp_path / "out").exists()


def test_model_directory(tmp_path, monkeypatch):
    assert model_directory(str(tmp_path)) == tmp_path
    for path in ["nowhere", "/no/such/place", f"{tmp_path}/none"]:
        with pytest.raises(ValueError, match="there is no model directory"):
            model_directory(path)
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: tmp_path / name)
    assert model_directory("owner/name") == tmp_path / "owner/name"

    def unreachable(name, **_):
        raise OSError("the hub cannot be reached.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match="no such model could be fetched.*cannot be reached"):
        model_directory("owner/name")


def test_import_and_export_on_eight_devices(tmp_path):
    config = tiny_config(
        num_layers=6, hidden_size=256, num_heads=8, head_dim=32, intermediate_size=512
    )
    source, out = write_directory(tmp_path / "source", config), tmp_path / "out"
    assert len(jax.devices()) == 8
    spec = model_spec(load_model_config(source))
    whole = import_params(source, spec)
    for sizes in [dict(fsdp=8), dict(data=2, fsdp=2, tensor=2)]:
        placed = shardings(spec.axes, spec.params, make_mesh(**sizes), TRAIN_RULES)
        params = import_params(source, spec, placed)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.array(a), b), params, whole)
        for value, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(placed), strict=True):
            assert value.sharding == sharding
        kernel = params["decoder"]["layers"]["0"]["mlp"]["gate"]["kernel"]
        assert kernel.addressable_shards[0].data.size * 8 // sizes.get("data", 1) == kernel.size

    params = import_params(source, spec, placed)  # arrays that no one has fetched yet
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 15 * largest
    tracemalloc.start()
    try:
        export(out, spec, params, tokenizer_files_from=source)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * largest + 1_000_000, (peak, largest)
    assert now < 2 * largest, now  # no array kept a copy of itself on the host
    assert_same_bits(stored(source), stored(out))


def image_folder(directory, config):
    """A folder of an image model: the language half in float32, two tensors of its encoder."""
    own = {"model.visual.a": np.arange(6, dtype=np.float16), "mtp.b": np.full(3, 0.5, np.float32)}
    renamed = {
        name.replace("model.", "model.language_model."): value
        for name, value in random_tensors(config).items()
    }
    write_directory(directory, config, tensors=renamed | own)
    text = to_hf_config(config) | {"model_type": "qwen3_vl_text", "architectures": None}
    hf = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text, "own": 1}
    (directory / "config.json").write_text(json.dumps(hf))
    (directory / "preprocessor_config.json").write_text("{}")
    return directory


def test_the_language_half_of_an_image_model_keeps_the_encoder_in_its_export(tmp_path, caplog):
    config = CONFIGS["qwen3"]
    source = image_folder(tmp_path / "source", config)
    assert load_model_config(source) == config
    found = source_at(str(source))
    assert found.image_model == str(source)
    assert "is an image model (qwen3_vl): its language half is used" in caplog.text
    spec = model_spec(config)
    params = import_params(source, spec)
    plain = write_directory(tmp_path / "plain", config)
    jax.tree.map(np.testing.assert_array_equal, params, import_params(plain, spec))

    how = {"tokenizer_files_from": source, "image_model": source}
    out = export(tmp_path / "out", spec, params, **how)
    assert_same_bits(stored(out), stored(source))
    assert json.loads((out / "config.json").read_text())["own"] == 1
    assert (out / "preprocessor_config.json").is_file()
    half = stored(export(tmp_path / "half", spec, params, **how, dtype="bfloat16"))
    assert half["model.visual.a"].dtype == np.float16
    assert half["lm_head.weight"].dtype == "bfloat16"

    # Checkpoints of a run say where the encoder is.
    files = tmp_path / "checkpoints" / "huggingface"
    write_huggingface_files(files, spec, CharTokenizer(), found.image_model)
    assert image_model_of_checkpoint(files) == str(source)
    assert load_model_config(files) == config
