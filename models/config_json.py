"""config.json of a Hugging Face folder: its text, and the types and bounds of its values.

`families.config_from_hf` makes a ModelConfig of it. Imports no jax.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.references import shown

_MOST = 2**31 - 1
_NEAR = 0.87  # below it are other keys, as original_max_position_embeddings
_LARGEST = 2**127  # Python's integers have no bound, and float() of a longer one raises
_SIZE = "a whole number from 1 to 2**31 - 1"
_COUNT = "a whole number from 0 to 2**31 - 1"


class _Wanted(NamedTuple):
    """The type and the bounds of some keys."""

    keys: tuple[str, ...]
    kind: Any
    name: str
    least: float = -math.inf
    most: float = math.inf


# Above the largest values memory is taken before anything is compared.
_TYPES = (
    _Wanted(
        ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads",
         "num_key_value_heads", "max_position_embeddings", "num_experts", "num_local_experts",
         "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "n_group",
         "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
         "v_head_dim", "no_rope_layer_interval", "sliding_window_pattern",
         "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads",
         "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
         "shared_expert_intermediate_size"),
        int, _SIZE, 1, _MOST,
    ),
    _Wanted(
        ("sliding_window", "max_window_layers", "n_shared_experts", "first_k_dense_replace"),
        int, _COUNT, 0, _MOST,
    ),
    _Wanted(("num_hidden_layers",), int, "a whole number of 1 up to 10,000", 1, 10_000),
    _Wanted(
        ("rope_theta", "rms_norm_eps", "initializer_range", "attn_logit_softcapping",
         "final_logit_softcapping"),
        int | float, "a number",
    ),
    _Wanted(("query_pre_attn_scalar",), int | float, "a number of 1 or more", 1),
    _Wanted(("architectures", "layer_types", "mlp_layer_types"), list, "a list of text"),
    _Wanted(("model_type", "hidden_act"), str, "text"),
    _Wanted(("rope_scaling", "rope_parameters"), dict, "a map"),
    _Wanted(
        ("tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "rope_interleave"),
        bool, "true or false",
    ),
)  # fmt: skip
# Numbers that must be finite and positive, also within the rope settings.
_POSITIVE = ("rope_theta", "rms_norm_eps", "initializer_range")
_POSITIVE_ROPE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor")


class BadValue(NamedTuple):
    """A value that no model can have."""

    key: str
    shown: str
    wanted: str


def read_config_json(directory: Path) -> dict[str, Any]:
    """The content of config.json. ValueError that names the file, and the key of a bad value."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; a model directory has config.json and weights (an export "
            f"without it was interrupted: export again)"
        )
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(hf, dict):
        raise ValueError(f"{path} holds a {type(hf).__name__}, not a JSON object; fetch it again")
    if bad := bad_value(hf):
        raise ValueError(
            f"{path} has {bad.key}={bad.shown}, which must be {bad.wanted}; fetch it again or "
            "correct it"
        )
    return hf


def bad_value(hf: Mapping[str, Any]) -> BadValue | None:
    """The first value of another type or out of bounds. A null value counts as absent."""
    for wanted in _TYPES:
        for key in wanted.keys:
            value = hf.get(key)
            if value is not None and not _fits(value, wanted):
                return BadValue(key, shown(value), wanted.name)
    for key, value in hf.items():
        if isinstance(value, int) and abs(value) > _LARGEST:
            return BadValue(key, shown(value), "a number that float32 can hold")
    bad = _not_positive(hf, _POSITIVE, "")
    for rope in ("rope_parameters", "rope_scaling"):
        bad = bad or _not_positive(hf.get(rope) or {}, _POSITIVE_ROPE, f"{rope}.")
    return bad


def check_hf_config(hf: Mapping[str, Any]) -> None:
    """ValueError for a value that no model can have, or a misspelt key."""
    if bad := bad_value(hf):
        raise ValueError(f"hf_config.{bad.key}={bad.shown}: must be {bad.wanted}")
    if misspelt := misspelt_key(hf):
        raise ValueError(f"unknown key hf_config.{misspelt[0]}; did you mean {misspelt[1]!r}?")


def misspelt_key(hf: Mapping[str, Any]) -> tuple[str, str] | None:
    """A key that nothing reads and the key that it nearly is; None where there is none.

    Configs have many keys that nothing reads, so only those very near to one that is read count.
    A longer one, such as Llama 4's intermediate_size_mlp, is another key, and those that begin with
    _ are transformers' own.
    """
    known = [key for wanted in _TYPES for key in wanted.keys]
    for key in hf.keys() - {*known}:
        near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_NEAR)
        if near and not key.startswith(("_", f"{near[0]}_")):
            return key, near[0]
    return None


def _fits(value: Any, wanted: _Wanted) -> bool:
    if not isinstance(value, wanted.kind):
        return False
    if isinstance(value, list):
        return all(isinstance(entry, str) for entry in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return isinstance(value, bool) == (wanted.kind is bool)
    return not (value < wanted.least or value > wanted.most)


def _not_positive(values: Mapping[str, Any], keys: Sequence[str], prefix: str) -> BadValue | None:
    """The first number that is not finite and positive."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, int | float) and not 0 < value < math.inf:
            return BadValue(f"{prefix}{key}", shown(value), "a positive number")
    return None
