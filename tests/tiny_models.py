"""Tiny random Hugging Face directories, written without the code under test."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.config import Config, ModelSettings
from jaxrl_llm.kernels.gated_delta import Runs, chunking_of, gated_delta
from jaxrl_llm.models.attention import Attend, Mixers
from jaxrl_llm.models.config import GatedDelta, Kind, Mixture, ModelConfig
from jaxrl_llm.models.families import config_from_hf, hf_names, to_hf_config
from jaxrl_llm.models.hf import stored_parts, whole_tensor
from jaxrl_llm.models.rope import Llama3Rope
from jaxrl_llm.tokenizer import CharTokenizer
from jaxrl_llm.typed_records.tree import every

NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def tiny_config(family: str = "llama", **changes) -> ModelConfig:
    sizes = dict(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=40,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    return ModelConfig(**(sizes | {"family": family} | changes))


GEMMA: dict = dict(
    unit_offset=True,
    activation="gelu_tanh",
    embedding_multiplier=math.sqrt(48),
    tie_word_embeddings=True,
)
HYBRID_FIELDS: dict = dict(
    unit_offset=True,
    qk_norm=True,
    attention_gate=True,
    rotary_factor=0.5,
    delta=GatedDelta(period=2, key_heads=2, value_heads=4, key_dim=6, value_dim=5, conv_size=4),
)
# Every family, and between them tied and untied tables, biases, norms on q and k, windows, rope
# scaling, grouped and odd head counts, and a head dim that is not hidden / heads.
CONFIGS = {
    "llama": tiny_config(
        rope_theta=500000.0,
        rope_scaling=Llama3Rope(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama_tied": tiny_config(
        tie_word_embeddings=True, hidden_size=36, num_heads=9, num_kv_heads=3, head_dim=4
    ),
    "mistral": tiny_config("mistral", sliding_window=(4, 4), head_dim=6),
    "qwen2": tiny_config("qwen2", attention_bias=True, tie_word_embeddings=True),
    "qwen2_window": tiny_config("qwen2", attention_bias=True, sliding_window=(None, 4)),
    "qwen3": tiny_config("qwen3", qk_norm=True, head_dim=10, num_heads=5, num_kv_heads=1),
    "smollm3": tiny_config(
        "smollm3", rope_layers=(True, False), sliding_window=(None, 4), tie_word_embeddings=True
    ),
    "granite": tiny_config(
        "granite",
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=1.5,
    ),
    "phi3": tiny_config("phi3", rotary_factor=0.5, sliding_window=(4, 4)),
    "olmo2": tiny_config("olmo2", norms="after", qk_norm=True, qk_norm_whole=True),
    "glm4": tiny_config(
        "glm4", norms="both", interleaved_rope=True, rotary_factor=0.5, attention_bias=True
    ),
    "gemma": tiny_config("gemma", **GEMMA),
    "gemma2": tiny_config(
        "gemma2",
        **GEMMA,
        norms="both",
        sliding_window=(4, None),
        attention_multiplier=5**-0.5,
        attention_softcap=1.5,
        logits_softcap=2.0,
    ),
    "gemma3": tiny_config(
        "gemma3_text",
        **GEMMA,
        qk_norm=True,
        norms="both",
        sliding_window=(4, None),
        local_rope_theta=50.0,
        attention_multiplier=5**-0.5,
    ),
    "gpt_oss": tiny_config(
        "gpt_oss",
        attention_bias=True,
        attention_out_bias=True,
        attention_sinks=True,
        expert_bias=True,
        swiglu_limit=0.7,
        sliding_window=(4, None),
        mixture=Mixture(num_experts=3, experts_per_token=2, expert_size=40, normalized=True),
    ),
    "qwen3_5": tiny_config("qwen3_5_text", **HYBRID_FIELDS),
}
HYBRID_EXPERTS = tiny_config(
    "qwen3_next",
    **HYBRID_FIELDS,
    mixture=Mixture(
        num_experts=4,
        experts_per_token=2,
        expert_size=8,
        normalized=True,
        shared_size=12,
        shared_gate=True,
    ),
)


def described_models(config: Config) -> dict[str, ModelConfig]:
    """The models that a config describes by `hf_config`, by their keys."""
    settings = {key: model.hf_config for key, model in every(config, ModelSettings)}
    return {key: config_from_hf({"vocab_size": 1} | hf) for key, hf in settings.items() if hf}


def with_rule(attend: Attend) -> Mixers:
    """`attend` with the gated delta rule of rows that hold one sample each."""

    def recur(inputs, cache):
        runs = Runs(jnp.zeros(inputs.rate_BTN.shape[:2], jnp.int32))
        return gated_delta(inputs, chunking_of(runs, inputs.kernels.q.shape[-1])), cache

    return Mixers(attend, recur)


def their_tensors(names: dict, ours: dict) -> dict[str, np.ndarray]:
    """Their tensors of our parameters by path; the parts of a fused one are joined."""

    def array(part):
        value = ours[part.path]
        return part.tensor.to_hf(value if len(names[part.path].parts) == 1 else value[part.index])

    return {
        name: whole_tensor(parts, [array(part) for part in parts])
        for name, parts in stored_parts(names).items()
    }


def our_params(names: dict, theirs: dict) -> dict[tuple[str, ...], np.ndarray]:
    """Our parameters by path from their tensors."""
    return {
        path: ours.joined([part.to_ours(theirs[part.name]) for part in ours.parts])
        for path, ours in names.items()
    }


def random_tensors(
    config: ModelConfig, kind: Kind = "causal_lm", dtype: str = "float32", seed: int = 0
) -> dict[str, np.ndarray]:
    """Values for every tensor of a Hugging Face file, norms near one."""
    rng = np.random.default_rng(seed)
    return {
        tensor.name: (
            0.2 * rng.normal(size=tensor.whole_shape) + tensor.name.endswith("norm.weight")
        ).astype(NUMPY_DTYPES[dtype])
        for ours in hf_names(config, kind).values()
        for tensor in ours.parts
    }


def write_directory(
    directory: Path,
    config: ModelConfig,
    kind: Kind = "causal_lm",
    dtype: str = "float32",
    tensors: dict[str, np.ndarray] | None = None,
    **config_changes,
) -> Path:
    """A whole model directory; `config_changes` go into config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, kind, dtype) if tensors is None else tensors
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    hf = to_hf_config(config, kind) | {"torch_dtype": dtype} | config_changes
    (directory / "config.json").write_text(json.dumps(hf))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    CharTokenizer().save(directory)
    return directory
