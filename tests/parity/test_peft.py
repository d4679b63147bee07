"""LoRA, rsLoRA and DoRA against PEFT: outputs, gradients and one update. And files, both ways."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import further
from tiny_models import CONFIGS, HYBRID_EXPERTS, their_tensors, with_rule, write_directory

from jaxrl_llm.checkpoint.huggingface import import_params
from jaxrl_llm.checkpoint.peft import adapter_tensors, export_adapter, import_adapter, read_lora
from jaxrl_llm.kernels.flash_attention import attention
from jaxrl_llm.models.base import bind, draw_params, merge_adapters, model_spec
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.lora import Lora, first_magnitudes, join, merged_ahead, split
from jaxrl_llm.models.lora_targets import chosen_modules

REASON = "pip install -e '.[parity]'"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
peft = pytest.importorskip("peft", reason=REASON)
pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(1).integers(2, 96, (2, 11)).astype(np.int32)
RATE = 1e-3
KINDS = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "some": {"targets": ("q_proj", r"model\.layers\.0\.mlp\.(up|down)_proj")},
    "tables": {"targets": ("v_proj", "embed_tokens", "lm_head")},
    "fused": {},
    "fused_dora": {"dora": True},
    "experts": {"targets": ("all-linear", "gate_up_proj", "down_proj")},
    "inner experts": {"targets": ("o_proj", "experts.gate_up_proj")},
    "hybrid": {},
    "hybrid_dora": {"dora": True},
    "hybrid_fused": {"targets": (r".*linear_attn\..*", "q_proj")},
    "hybrid_fused_dora": {"targets": (r".*linear_attn\..*",), "dora": True},
}
FAMILY = {"tables": "llama"}  # with a head of its own
FAMILY |= {"fused": "phi3", "fused_dora": "phi3", "experts": "gpt_oss", "inner experts": "gpt_oss"}
FAMILY |= {"hybrid": "qwen3_5", "hybrid_dora": "qwen3_5"}


def config_of(kind):
    if kind.startswith("hybrid_fused"):
        return HYBRID_EXPERTS
    name = next(n for n in CONFIGS if n.startswith(FAMILY.get(kind, "qwen2")))
    if kind == "tables":
        name = next(n for n, c in CONFIGS.items() if not c.tie_word_embeddings)
    return CONFIGS[name]


def atol_of(config):
    """The rule of a hybrid divides by norms of small keys: rounding grows."""
    return 1e-5 if config.delta is None else 1e-4


def make_lora(config, *, targets=("all-linear",), kind="causal_lm", **flags):
    names = [tensor.name for tensor in hf_names(config, kind).values()]
    return Lora(rank=3, alpha=5.0, modules=chosen_modules(targets, names), **flags)


def hidden_of(model):
    def attend(q, k, v, cache, **how):
        return attention(q, k, v, **how), cache

    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return model(TOKENS, positions, attend=with_rule(attend))[0]


def our_loss(spec, base, own):
    """The mean likelihood loss of the next token, and the logits."""
    model = bind(spec, join(base, own))
    logits = model.logits(hidden_of(model))
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    taken = jnp.take_along_axis(logprobs, TOKENS[:, 1:, None], axis=-1)
    return -taken.mean(), logits


def tensors_of(spec, own):
    """Our parameters that learn under PEFT's names."""
    leaves = jax.tree_util.tree_leaves_with_path(own)
    named = {tuple(entry.key for entry in path): np.asarray(leaf) for path, leaf in leaves}
    return their_tensors(adapter_tensors(spec), named)


def peft_name(name):
    """The name of a parameter of a PeftModel as the file has it."""
    name = name.replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name


# Together they prove what the others do.
FIRST = ("lora", "dora", "tables", "fused", "experts", "hybrid_fused_dora")


@pytest.mark.parametrize(
    "kind", further([*FIRST, *(kind for kind in KINDS if kind not in FIRST)], first=len(FIRST))
)
def test_peft_computes_the_same(tmp_path, kind):
    config, flags = config_of(kind), KINDS[kind]
    atol = atol_of(config)
    source = write_directory(tmp_path / "source", config)
    spec = model_spec(config, lora=make_lora(config, **flags))
    base = import_params(source, model_spec(config))
    # Not the first values: B of zeros would hide A.
    own = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
        draw_params(spec, spec.learned, jax.random.key(3)),
    )
    own = split(first_magnitudes(join(base, own), spec.lora))[1]
    if spec.lora.dora:  # norms that differ from the weights' own
        own = jax.tree.map_with_path(
            lambda path, x: x * 1.1 if path[-1].key == "magnitude" else x, own
        )
    folder = export_adapter(tmp_path / "adapter", spec, own, base=str(source))

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    theirs = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    out = theirs(torch.from_numpy(TOKENS).long(), labels=torch.from_numpy(TOKENS).long())
    (loss, logits), grads = jax.jit(
        jax.value_and_grad(partial(our_loss, spec, base), has_aux=True)
    )(own)
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), atol=atol)
    np.testing.assert_allclose(loss, out.loss.item(), atol=atol)

    learned = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    adam = torch.optim.Adam(learned.values(), lr=RATE, eps=1e-4)
    out.loss.backward()
    expected = {peft_name(name): p.grad.numpy() for name, p in learned.items()}
    found = tensors_of(spec, grads)
    assert found.keys() == expected.keys()
    for name in expected:  # the largest gradients are above 5
        np.testing.assert_allclose(found[name], expected[name], 1e-5, atol, err_msg=name)

    adam.step()
    ours = optax.adam(RATE, eps=1e-4)
    updates, _ = ours.update(grads, ours.init(own))
    found = tensors_of(spec, optax.apply_updates(own, updates))
    for name, p in learned.items():
        key = peft_name(name)
        np.testing.assert_allclose(found[key], p.detach().numpy(), atol=atol, err_msg=name)

    # With merged weights, as updates compute.
    ahead = merged_ahead(join(base, own), spec.lora, "float32")
    again = jax.jit(jax.grad(lambda own: our_loss(spec, ahead, own)[0]))(own)
    if spec.lora.merges_updates:
        for one, other in zip(*map(jax.tree.leaves, (again, grads)), strict=True):
            np.testing.assert_allclose(one, other, rtol=atol, atol=atol)

    # The merged model has the same outputs as PEFT's merged model.
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(source), folder
    ).merge_and_unload()
    dense, params = merge_adapters(spec, join(base, own))
    model = bind(dense, params)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(model.logits(hidden_of(model)), expected, atol=atol)


@pytest.mark.parametrize("kind", ["lora", "dora", "fused", "experts", "hybrid", "hybrid_fused"])
def test_an_adapter_of_peft_is_read_and_written(tmp_path, kind):
    config, flags = config_of(kind), KINDS[kind]
    atol = atol_of(config)
    source = write_directory(tmp_path / "source", config)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(0)
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if kind == "experts" else None
    linear = r".*(linear_attn|self_attn)\..*_proj.*" if kind == "hybrid_fused" else "all-linear"
    theirs = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=3, lora_alpha=7, target_modules=linear, use_dora="dora" in flags,
            use_rslora=kind != "experts", init_lora_weights=False, target_parameters=parameters,
        ),
    )  # fmt: skip
    with torch.no_grad():  # drawn large: the logits would have large errors of rounding
        for parameter in theirs.parameters():
            parameter.mul_(0.3 if parameter.requires_grad else 1.0)
    theirs.save_pretrained(tmp_path / "theirs")
    lora = read_lora(tmp_path / "theirs", config, "causal_lm", dtype="float32", dropout=0.0)
    assert (lora.rank, lora.alpha, lora.dora) == (3, 7.0, "dora" in flags)
    assert lora.rslora == (kind != "experts")
    spec = model_spec(config, lora=lora)
    own = import_adapter(tmp_path / "theirs", spec)
    base = import_params(source, model_spec(config))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(our_loss(spec, base, own)[1], expected, atol=atol)

    export_adapter(tmp_path / "ours", spec, own, base=str(source))
    again = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(source), tmp_path / "ours"
    )
    theirs_now, ours_now = (peft.get_peft_model_state_dict(each) for each in (theirs, again))
    assert theirs_now.keys() == ours_now.keys()
    assert all(torch.equal(theirs_now[name], ours_now[name]) for name in theirs_now)


def test_a_scalar_model_with_its_head(tmp_path):
    config = config_of("lora")
    source = write_directory(tmp_path / "source", config, "scalar")
    spec = model_spec(config, "scalar", lora=make_lora(config, kind="scalar"))
    base = import_params(source, model_spec(config, "scalar"))
    own = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
        draw_params(spec, spec.learned, jax.random.key(3)),
    )
    folder = export_adapter(tmp_path / "adapter", spec, own, base=str(source))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    theirs = peft.PeftModel.from_pretrained(model, folder)
    model = bind(spec, join(base, own))
    scores = model.scores(hidden_of(model))[:, -1]
    theirs.config.pad_token_id = theirs.base_model.model.config.pad_token_id = 0
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits[:, 0].numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-5)
