"""Converts a GGUF file to a Hugging Face directory, with numpy only.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Block layouts: ggml-quants.c.
Supported are the architecture "llama", a byte-level BPE tokenizer, and the tensor types of
`_BLOCK_TYPES`. The library `gguf` gives the same values, and takes 6 s instead of 0.2 s to read the
header of a 135M model. It converts neither configs nor tokenizers.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxrl_llm.checkpoint.safetensors_files import LazyTensor, float_dtype, write_model_files

_SCALAR_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token
_MAX_SHARD_BYTES = 5_000_000_000
HEADS, HEADS_KV = "llama.attention.head_count", "llama.attention.head_count_kv"
EMBEDDING = "token_embd.weight"


# Each function takes raw blocks [num_blocks, block_bytes] (uint8) and returns
# float32 [num_blocks, block_elements].


def _float32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4")


def _float16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bfloat16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view(ml_dtypes.bfloat16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, 16] bytes -> [n, 32] values 0..15: first the low halves, then the high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    scale = _float16(blocks[:, :2].copy())
    return (_nibbles(blocks[:, 2:]) - 8.0) * scale


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    scale, minimum = _float16(blocks[:, :2].copy()), _float16(blocks[:, 2:4].copy())
    return _nibbles(blocks[:, 4:]) * scale + minimum


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    scale = _float16(blocks[:, :2].copy())
    return blocks[:, 2:].view(np.int8).astype(np.float32) * scale


@dataclass(frozen=True)
class _BlockType:
    elements: int  # values in one block
    nbytes: int  # size of one block
    dequantize: Callable[[np.ndarray], np.ndarray]


_BLOCK_TYPES = {
    0: _BlockType(1, 4, _float32),
    1: _BlockType(1, 2, _float16),
    2: _BlockType(32, 18, _q4_0),
    3: _BlockType(32, 20, _q4_1),
    8: _BlockType(32, 34, _q8_0),
    30: _BlockType(1, 2, _bfloat16),
}


@dataclass(frozen=True)
class GgufTensor:
    """Place of one tensor. `shape` is row-major, the reverse of the order in the file."""

    shape: tuple[int, ...]
    block_type: _BlockType
    offset: int  # bytes from the start of the file


class _Cursor:
    """Reads the little-endian header from front to back."""

    def __init__(self, data: np.ndarray):
        self._view = data.data
        self.position = 0

    def take(self, count: int) -> memoryview:
        piece = self._view[self.position : self.position + count]
        self.position += count
        return piece

    def number(self, fmt: str) -> Any:
        return struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt)))[0]

    def string(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8", "backslashreplace")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.number(_SCALAR_FORMATS[type_id])
        item_type, count = self.number("I"), self.number("Q")
        if item_type in _SCALAR_FORMATS:  # one unpack for all items
            fmt = f"<{count}{_SCALAR_FORMATS[item_type]}"
            return list(struct.unpack(fmt, self.take(struct.calcsize(fmt))))
        return [self.value(item_type) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name = self.string()
        dims = [self.number("Q") for _ in range(self.number("I"))]
        return name, tuple(reversed(dims)), self.number("I"), self.number("Q")


class GgufFile:
    """A GGUF file opened for reading: `metadata`, `tensors` by name, and `read(name)`."""

    def __init__(self, path: str | Path):
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self._bytes)
        magic, version = bytes(cursor.take(4)), cursor.number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path} is not a GGUF file of version 2 or 3")
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        entries = [cursor.tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        data_start = math.ceil(cursor.position / alignment) * alignment
        self.tensors = {
            name: GgufTensor(shape, _BLOCK_TYPES[kind], data_start + offset)
            for name, shape, kind, offset in entries
        }
        if len(self.tensors) < num_tensors:
            raise ValueError(f"{path} has two tensors of one name")

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32, row-major."""
        tensor = self.tensors[name]
        kind = tensor.block_type
        num_blocks = math.prod(tensor.shape) // kind.elements
        raw = self._bytes[tensor.offset : tensor.offset + num_blocks * kind.nbytes]
        blocks = np.array(raw).reshape(num_blocks, kind.nbytes)
        return kind.dequantize(blocks).reshape(tensor.shape)


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key weight [heads * head_dim, D] from GGUF to Hugging Face.

    llama.cpp rotates neighbouring pairs of a head, Hugging Face rotates the two halves. So the
    conversion to GGUF interleaved the two halves of every head of a Llama model.
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


_TOP_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _check_supported(metadata: Mapping[str, Any]) -> None:
    """Refuse features that would be converted to a wrong model."""
    for key, supported in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if metadata[key] != supported:
            raise ValueError(f"GGUF {key} {metadata[key]!r} is not supported; {supported!r} is")
    scaled = sorted(key for key in metadata if key.startswith("llama.rope.scaling."))
    if scaled:
        raise ValueError(f"GGUF rope scaling ({', '.join(scaled)}) is not supported")


def hf_config(gguf: GgufFile, dtype: str) -> dict[str, Any]:
    """The content of config.json for a Llama GGUF file."""
    metadata = gguf.metadata
    _check_supported(metadata)
    hidden, heads = metadata["llama.embedding_length"], metadata[HEADS]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": gguf.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(HEADS_KV, heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF stores float32, so 1e-5 is read as 9.99999974e-06
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype,
    }


def hf_tensors(gguf: GgufFile) -> list[LazyTensor]:
    """Every tensor under its Hugging Face name. It is dequantised when it is written."""
    heads = gguf.metadata[HEADS]
    permuted_heads = {"attn_q": heads, "attn_k": gguf.metadata.get(HEADS_KV, heads)}

    def lazy(name: str) -> LazyTensor:
        shape = gguf.tensors[name].shape
        if name in _TOP_NAMES:
            return LazyTensor(_TOP_NAMES[name], shape, lambda: gguf.read(name))
        block, layer, part, suffix = (name.split(".") + [""] * 4)[:4]
        if block != "blk" or suffix != "weight" or part not in _LAYER_NAMES:
            raise ValueError(f"GGUF tensor {name!r} has no place in a Llama model")
        hf_name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        if part in permuted_heads:
            return LazyTensor(
                hf_name, shape, lambda: unpermute(gguf.read(name), permuted_heads[part])
            )
        return LazyTensor(hf_name, shape, lambda: gguf.read(name))

    return [lazy(name) for name in gguf.tensors]


def bpe_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of a GGUF file.

    GGUF has only the name of the pre-tokenizer. "smollm" first splits numbers into digits; without
    that, the tokens of numbers differ from those that the model was trained on.
    """
    name = metadata["tokenizer.ggml.pre"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    known = {"smollm": pre_tokenizers.Sequence([digits, byte_level]), "gpt-2": byte_level}
    if name not in known:
        raise ValueError(f"GGUF pre-tokenizer {name!r} is not supported; known: {', '.join(known)}")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = known[name]
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json, chat template included."""
    config: dict[str, Any] = {
        # The general class: a model's own class would replace our pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    for word, key in [("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")]:
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{word}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def convert(
    gguf_path: str | Path, output: str | Path, *, dtype: str = "bfloat16", model_card: str = ""
) -> Path:
    """Write the model of `gguf_path` to `output` as a Hugging Face directory. Returns its path.

    One tensor is in memory at a time. config.json is written last: a directory without it was
    interrupted. ValueError names a feature of the file that is not supported.
    """
    gguf = GgufFile(gguf_path)
    config = hf_config(gguf, dtype)
    tensors, tokenizer = hf_tensors(gguf), bpe_tokenizer(gguf.metadata)
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    write_model_files(directory, tensors, float_dtype(dtype), _MAX_SHARD_BYTES)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(gguf.metadata))
    special_ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(
        directory / "generation_config.json",
        {k: v for k, v in special_ids.items() if v is not None},
    )
    if model_card:
        (directory / "README.md").write_text(model_card)
    _write_json(directory / "config.json", config)
    return directory


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
