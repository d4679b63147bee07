"""What we export, transformers opens: the same tensors, the same logits. And the way back."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_goldens
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, tiny_config, with_rule, write_directory

from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
from jaxrl_llm.kernels.flash_attention import attention
from jaxrl_llm.models import families
from jaxrl_llm.models.base import ModelSpec, Params, bind, model_spec
from jaxrl_llm.tokenizer import CharTokenizer

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(1).integers(2, 96, (2, 11)).astype(np.int32)


def our_output(spec: ModelSpec, params: Params) -> np.ndarray:
    """Logits [B, T, V], or scores [B, T] of a scalar model."""

    def attend(q, k, v, cache, **how):
        return attention(q, k, v, **how), cache

    def run(params):
        model = bind(spec, params)
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        hidden, _ = model(TOKENS, positions, attend=with_rule(attend))
        return model.logits(hidden) if spec.kind == "causal_lm" else model.scores(hidden)

    return np.asarray(jax.jit(run)(params))


def torch_bits(model) -> dict[str, tuple]:
    """Shape and bytes of every tensor of a torch model's state."""
    return {
        name: (tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in model.state_dict().items()
    }


FAMILIES = [("float32", case) for case in CONFIGS] + [("bfloat16", "llama")]
FAMILIES += [pytest.param("bfloat16", x, marks=pytest.mark.slow) for x in CONFIGS if x != "llama"]


@pytest.mark.parametrize(("dtype", "case"), FAMILIES)
def test_language_model(tmp_path, case, dtype):
    config = CONFIGS[case]
    source = write_directory(tmp_path / "source", config, dtype=dtype)
    spec = model_spec(config, dtype=dtype)
    params = import_params(source, spec)
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=source, max_shard_bytes=20000)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)
    expected = {
        name: (value.shape, value.tobytes())
        for name, value in load_file(source / "model.safetensors").items()
    }
    if config.tie_word_embeddings:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert torch_bits(theirs) == expected
    assert theirs.generation_config.eos_token_id == [1, 5]

    if dtype == "float32":
        with torch.no_grad():
            logits = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
        np.testing.assert_allclose(our_output(spec, params), logits, atol=1e-4)


@pytest.mark.parametrize("case", CONFIGS)
def test_scalar_model(tmp_path, case):
    config = CONFIGS[case]
    source = write_directory(tmp_path / "source", config, "scalar")
    spec = model_spec(config, "scalar")
    params = import_params(source, spec)
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=CharTokenizer())
    if config.family == "granite":
        pytest.skip("transformers has no GraniteForSequenceClassification")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert theirs.config.num_labels == 1
    with torch.no_grad():
        scores = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()[:, 0]
    np.testing.assert_allclose(our_output(spec, params)[:, -1], scores, atol=1e-4)


@pytest.mark.parametrize("case", CONFIGS)
def test_what_transformers_writes(tmp_path, case):
    """A directory of save_pretrained, in shards, reads as the same model and goes back the same."""
    config = CONFIGS[case]
    first = write_directory(tmp_path / "first", config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(first)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    saved = tmp_path / "saved"
    assert (saved / "model.safetensors.index.json").is_file()
    assert load_model_config(saved) == config
    spec = model_spec(config)
    params = import_params(saved, spec)
    out = export(tmp_path / "out", spec, params, tokenizer_files_from=first)
    back = load_file(out / "model.safetensors")
    original = load_file(first / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(back[name].tobytes() == original[name].tobytes() for name in back)


@pytest.mark.parametrize("name", make_goldens.CASES)
def test_goldens_are_the_logits_of_this_transformers(tmp_path, name):
    """Under the config of the case and under ours: tests/models/test_models.py reads the goldens.

    Each config comes back as this version of transformers writes it, not as the case spells it.
    """
    golden = np.load(Path(make_goldens.__file__).with_name(f"{name}.npz"))
    hf, weights = json.loads(str(golden["config"])), "weights/"
    _, kind = families.find_architecture(hf)
    config = families.config_from_hf(hf).for_context(golden["tokens"].shape[1])
    save_file(
        {k.removeprefix(weights): golden[k] for k in golden if k.startswith(weights)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    for written in (hf, families.to_hf_config(config, kind) | {"pad_token_id": 0}):
        (tmp_path / "config.json").write_text(json.dumps(written))
        cls = getattr(transformers, written["architectures"][0])
        model = cls.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
        found = make_goldens.logits(model.eval(), golden["tokens"])
        np.testing.assert_allclose(found, golden["logits"], atol=1e-4)
        again = model.config.to_dict() | {"architectures": written["architectures"]}
        assert families.config_from_hf(again).for_context(golden["tokens"].shape[1]) == config


def test_tokenizer_chat_template_and_generation_config(tmp_path):
    config = tiny_config()
    source = write_directory(tmp_path / "source", config)
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["jaxrl_llm_tokenizer"]  # now like any other tokenizer
    (source / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
    spec = model_spec(config)
    out = export(
        tmp_path / "out",
        spec,
        import_params(source, spec),
        tokenizer_files_from=source,
        generation_config={"eos_token_id": 1, "pad_token_id": 0, "do_sample": True, "top_k": 7},
    )
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    ours = transformers.AutoTokenizer.from_pretrained(out)
    text = "x + 12 = ?"
    assert ours.encode(text) == theirs.encode(text) and ours.chat_template == template
    messages = [{"role": "user", "content": text}]
    assert ours.apply_chat_template(messages, tokenize=False) == f"user:{text}\n"
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert generation.top_k == 7 and generation.pad_token_id == 0
    assert transformers.AutoConfig.from_pretrained(out).pad_token_id == 0
