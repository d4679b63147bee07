"""Mixtures of experts against transformers: log-probs, gradients, router losses and whole folders.

Log-probs come from the learner, in padded and in packed rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import further
from golden import make_goldens
from packaging.version import Version
from safetensors.numpy import load_file
from tiny_iteration import random_params
from tiny_models import NUMPY_DTYPES

from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
from jaxrl_llm.checkpoint.mxfp4 import unpacked
from jaxrl_llm.checkpoint.peft import export_adapter, import_adapter, lost_by_peft, read_lora
from jaxrl_llm.config import ConfigError
from jaxrl_llm.learner.forward import ForwardSettings, response_statistics
from jaxrl_llm.learner.micro_batches import Packed
from jaxrl_llm.learner.router_losses import load_balance
from jaxrl_llm.learner.rows import rows_of, sample_fields
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.lora import Lora, join, merged_ahead
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.tokenizer import CharTokenizer

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

FAMILIES = ["qwen3_moe_window", "mixtral_tied", "olmoe_gqa", "gpt_oss"]
FAMILIES += ["deepseek_v3", "deepseek_v3_plain", "glm4_moe_lite"]
FAMILIES += ["qwen3_next", "qwen3_5_moe"]
BIAS = "e_score_correction_bias"  # a buffer of theirs
GATE = "mlp.gate.weight"
ROUNDS_GATES = Version(transformers.__version__) < Version("5.24")
PROMPTS, RESPONSES = (3, 5, 2), (6, 4, 1)  # tokens


def samples():
    rng = np.random.default_rng(5)
    # Not 0: torch has no gradient for the embedding of the padding.
    prompts = rng.integers(1, 40, (3, 5)).astype(np.int32)
    responses = rng.integers(1, 40, (3, 6)).astype(np.int32)
    mask = (np.arange(6) < np.array(RESPONSES)[:, None]).astype(np.float32)
    lengths = np.array(PROMPTS), np.array(RESPONSES)
    fields = sample_fields(*map(jnp.asarray, (prompts, lengths[0], responses, lengths[1])))
    return fields | {"mask": jnp.asarray(mask)}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A model of transformers, and the folder that it saved."""
    path = tmp_path_factory.mktemp(request.param)
    model = make_goldens.build(make_goldens.CASES[request.param], seed=11)
    model.save_pretrained(path)
    return path, model


def their_logprobs(model, fields):
    """Log-probs [B, R] of the responses, and the load-balance loss of all real tokens."""
    tokens = np.zeros((3, 11), np.int64)
    real = np.zeros((3, 11), np.int64)
    for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens[i, : p + r] = [*fields["prompts"][i, :p], *fields["responses"][i, :r]]
        real[i, : p + r] = 1
    has_loss = not hasattr(model.config, "kv_lora_rank")
    asked = {"output_router_logits": True} if has_loss else {}
    output = model(torch.from_numpy(tokens), attention_mask=torch.from_numpy(real), **asked)
    logprobs = torch.log_softmax(output.logits, dim=-1)
    picked = torch.zeros(3, 6)
    for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for t in range(r):
            picked[i, t] = logprobs[i, p + t - 1, tokens[i, p + t]]
    return picked, output.aux_loss if has_loss else None


def as_folder(spec, tree, like, path):
    """A tree of arrays by the names of a file: a gradient as if it were weights."""
    export(path, spec, tree, tokenizer_files_from=CharTokenizer())
    found = load_file(path / "model.safetensors")
    assert found.keys() == load_file(like / "model.safetensors").keys()
    return found


# Padded rows of all families: the goldens of tests/models/test_models.py.
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_logprobs_gradients_and_balance_equal(folder, packed, tmp_path):
    path, model = folder
    spec, fields = model_spec(load_model_config(path)), samples()
    params = import_params(path, spec)
    if packed:
        parts = Packed(row_tokens=24).split(fields)
        assert int(parts.num) == 1
        fields = parts.at(0)
    cotangent = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)

    def loss(params):
        found = response_statistics(params, rows_of(fields), spec=spec, settings=ForwardSettings())
        balance = load_balance(found.routed)
        total = (found.logprobs * fields["mask"] * cotangent).sum()
        total += 3.0 * balance if their_balance is not None else 0.0
        return total, (found.logprobs * fields["mask"], balance)

    theirs, their_balance = their_logprobs(model, samples())
    (_, (ours, balance)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-4)
    model.zero_grad()
    total = (theirs * torch.from_numpy(cotangent)).sum()
    if their_balance is not None:
        np.testing.assert_allclose(balance, their_balance.item(), rtol=1e-5)
        total = total + 3.0 * their_balance
    total.backward()
    of_model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, weight in of_model.named_parameters():
            weight.copy_(dict(model.named_parameters())[name].grad)
    of_model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = as_folder(spec, grads, path, tmp_path / "ours")
    for name, gradient in expected.items():
        if name.endswith(BIAS):
            assert not found[name].any()
            continue
        scale = max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(found[name] / scale, gradient / scale, atol=1e-4, err_msg=name)


def test_four_bits_give_their_values():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 4, 16)).astype(np.uint8)
    scales = rng.integers(100, 140, (3, 10, 4)).astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.testing.assert_array_equal(unpacked(blocks, scales), theirs.float().numpy())


def kept(spec, dtype, tensor):
    """True if a tensor of a folder in `dtype` is float32."""
    sigmoid = spec.config.mixture.scores == "sigmoid" and tensor.endswith((BIAS, GATE))
    norm = spec.config.family == "gpt_oss" and tensor.endswith("norm.weight")
    return dtype == "float32" or sigmoid or (norm and dtype == "float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_survives_bit_for_bit(folder, dtype, tmp_path):
    path, model = folder
    saved = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    saved.save_pretrained(tmp_path / "theirs")
    own = "float32" if dtype == "float16" else dtype  # no model computes in float16
    spec = model_spec(load_model_config(path), dtype=own)
    params, source = import_params(tmp_path / "theirs", spec), CharTokenizer()
    out = export(tmp_path / "ours", spec, params, tokenizer_files_from=source, dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        in_file = NUMPY_DTYPES["float32" if kept(spec, dtype, name) else dtype]
        assert after[name].dtype == in_file, name
        # Earlier versions of transformers round the gate.
        assert value.dtype == in_file or (name.endswith(GATE) and ROUNDS_GATES), name
        assert value.astype(in_file).tobytes() == after[name].tobytes(), name
    for name, value in theirs.state_dict().items():
        assert torch.isfinite(value.float()).all(), name


# Gates with a bias, experts that are shared, and a family that PEFT loses.
WITH_ADAPTERS = ("gpt_oss", "deepseek_v3", "qwen3_5_moe")


@pytest.mark.parametrize(
    "folder",
    further([*WITH_ADAPTERS, *(x for x in FAMILIES if x not in WITH_ADAPTERS)], first=3),
    indirect=True,
)
def test_adapters_of_experts_are_those_of_peft(folder, tmp_path):
    """PEFT joins gate and up, with twice the rank: of A it has ours, of B a diagonal of blocks."""
    path, _ = folder
    peft = pytest.importorskip("peft", reason="pip install -e '.[parity]'")
    config, fields = load_model_config(path), samples()
    modules = chosen_modules(
        ["all-linear"], [t.name for t in hf_names(config, "causal_lm").values()]
    )
    lost = lost_by_peft(config, "causal_lm", modules)
    assert bool(lost) == bool(config.mixture.shared_size)
    if lost:
        whole = model_spec(config, lora=Lora(rank=3, alpha=5.0, modules=modules))
        with pytest.raises(ConfigError, match=f"{lost[0]}.*Write the merged model"):
            export_adapter(tmp_path / "lost", whole, {}, base=str(path))
    spec = model_spec(config, lora=Lora(rank=3, alpha=5.0, modules=modules - {*lost}))
    base = import_params(path, model_spec(config))
    own = random_params(spec.learned, 1, 0.2)
    if config.family == "qwen3_5_moe_text":
        with pytest.raises(ConfigError, match="PEFT loses adapters of experts of qwen3_5_moe_text"):
            export_adapter(tmp_path / "lost", spec, own, base=str(path))
        return
    atol = 1e-5 if config.delta is None else 1e-4  # the rule divides by norms of small keys
    out = export_adapter(tmp_path / "adapter", spec, own, base=str(path))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    model = peft.PeftModel.from_pretrained(model, out, is_trainable=True)

    def loss(own, base):
        params = join(base, own)
        found = response_statistics(params, rows_of(fields), spec=spec, settings=ForwardSettings())
        return (found.logprobs * fields["mask"]).sum(), found.logprobs * fields["mask"]

    theirs, _ = their_logprobs(model, fields)
    theirs.sum().backward()
    gradients = {
        name: p.grad.numpy()
        for name, p in model.named_parameters()
        if p.requires_grad and ".experts." in name and "lora_A" in name
    }
    expected = sum((g.astype(np.float64) ** 2).sum() for g in gradients.values())
    merged = merged_ahead(join(base, own), spec.lora, "float32")
    for form in (base, merged):
        (_, ours), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(own, form)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=atol)
        of_experts = [
            x
            for p, x in jax.tree_util.tree_leaves_with_path(found)
            if p[-1].key == "a" and x.ndim == 3 and "mlp" in {entry.key for entry in p}
        ]
        np.testing.assert_allclose(sum((x**2).sum() for x in of_experts), expected, rtol=atol)

    again = import_adapter(
        out,
        model_spec(config, lora=read_lora(out, config, "causal_lm", dtype="float32", dropout=0)),
    )
    jax.tree.map(np.testing.assert_array_equal, again, own)
