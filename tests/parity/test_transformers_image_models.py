"""The language half of image models: transformers' folders, its logits for text, and back."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_transformers_roundtrip import TOKENS, our_output, torch_bits

from jaxrl_llm.checkpoint.huggingface import export, import_params, load_model_config
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.image_models import IMAGE_MODELS
from jaxrl_llm.tokenizer import CharTokenizer

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

TEXT = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
DEPTH = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24}
QWEN = DEPTH | {"patch_size": 4, "out_hidden_size": 24}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
WHERE = {"image_token_id": 90, "video_token_id": 91}
WHERE |= {"vision_start_token_id": 92, "vision_end_token_id": 93}
LLAMA = {"model_type": "llama", "rope_parameters": ROPE} | TEXT
# Arguments of the config of each: its parts, and the rest.
MODELS = {
    "gemma3": {
        "text_config": TEXT | {"head_dim": 6, "sliding_window": 4, "query_pre_attn_scalar": 6},
        "vision_config": {"model_type": "siglip_vision_model"} | SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
    },
    "idefics3": {
        "text_config": LLAMA,
        "vision_config": SIGLIP,
        "image_token_id": 90,
        "scale_factor": 2,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 6} | LLAMA | {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", "head_dim": 8} | SIGLIP,
        "image_token_index": 90,
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 1]}},
        "vision_config": QWEN | {"window_size": 16, "fullatt_block_indexes": [1]},
        **WHERE,
    },
    "qwen3_5": {
        "text_config": TEXT
        | {
            "head_dim": 16,
            "rope_parameters": ROPE
            | {
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
            "layer_types": ["linear_attention", "full_attention"],
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "vision_config": QWEN | {"num_position_embeddings": 16},
        **WHERE,
    },
    "qwen3_vl": {
        "text_config": TEXT
        | {
            "head_dim": 12,
            "rope_parameters": ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **WHERE,
    },
    "smolvlm": {
        "text_config": LLAMA,
        "vision_config": SIGLIP,
        "image_token_id": 90,
        "scale_factor": 2,
    },
}


def saved_model(folder, name: str, **changes):
    """A tiny random model of transformers, and its folder."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **MODELS[name] | changes)
    model = getattr(transformers, IMAGE_MODELS[name].architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2).add_(0.5 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(folder)
    CharTokenizer().save(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    return model


def test_every_image_model_is_compared():
    assert MODELS.keys() == IMAGE_MODELS.keys()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_language_half(tmp_path, name, tied):
    theirs = saved_model(tmp_path / "source", name, tie_word_embeddings=tied)
    config = load_model_config(tmp_path / "source")
    assert config.tie_word_embeddings == tied
    spec = model_spec(config)
    params = import_params(tmp_path / "source", spec)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(our_output(spec, params), expected, atol=1e-4)

    out = export(
        tmp_path / "out",
        spec,
        params,
        tokenizer_files_from=tmp_path / "source",
        image_model=tmp_path / "source",
        max_shard_bytes=20000,
    )
    back = type(theirs).from_pretrained(out, dtype="auto")
    assert torch_bits(back) == torch_bits(theirs)
    assert back.config.text_config.to_dict() == theirs.config.text_config.to_dict() | {
        "dtype": back.config.text_config.to_dict()["dtype"]
    }
    assert back.generation_config.eos_token_id == [2, 5]


def test_an_older_folder_of_qwen2_5_vl(tmp_path):
    """Its config.json has no text_config, and its names no `language_model`."""
    theirs = saved_model(tmp_path / "source", "qwen2_5_vl")
    path = tmp_path / "source" / "config.json"
    hf = json.loads(path.read_text())
    rope = {"type": "mrope", "mrope_section": [1, 1, 1]}
    text = {key: value for key, value in hf.pop("text_config").items() if key != "rope_parameters"}
    own = {"model_type": "qwen2_5_vl", "rope_theta": 5000.0, "rope_scaling": rope}
    path.write_text(json.dumps(hf | text | own))
    names = load_file(tmp_path / "source" / "model.safetensors").keys()
    assert {"visual.patch_embed.proj.weight", "model.embed_tokens.weight"} <= names

    spec = model_spec(load_model_config(tmp_path / "source"))
    params = import_params(tmp_path / "source", spec)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(our_output(spec, params), expected, atol=1e-4)
