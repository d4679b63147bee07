"""Tokenizers for tests of chat templates, of three kinds, with the special tokens of all families.

`byte` is byte-level BPE (Qwen, Llama 3). `blank` puts a blank before every text (Llama 2, Phi-3).
`first` puts one before a text that begins a document (Mistral).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from jaxrl_llm.tokenizer import HFTokenizer

KINDS = ("byte", "blank", "first")
TEXT = [
    "The weather in Lima is fine. Please add 17 and 25. What is 2+2? It is four.",
    "user assistant system model tool function arguments name city Hello Bye Sure thinking answer",
    'You are brief. {"name": "add", "arguments": {"a": 1, "b": 2}} User: Assistant: [INST] [/INST]',
]
# Tokens that are added and are no special ones, as in Qwen's and GLM's files.
PLAIN = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
BOS, EOS = "<bos>", "<eos>"


@cache
def trained(kind: str) -> Tokenizer:
    """A small BPE vocabulary."""
    fast = Tokenizer(models.BPE(byte_fallback=kind != "byte", unk_token=None))
    alphabet: list[str] = []
    if kind == "byte":
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "blank":
        fast.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind != "byte":
        fast.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[f"<0x{byte:02X}>" for byte in range(256)] if kind != "byte" else [],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    pre_tokenizer = fast.pre_tokenizer
    if kind != "byte":  # as sentencepiece, which puts no blank behind a word
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    fast.train_from_iterator(TEXT, trainer)
    if kind == "blank":
        fast = Tokenizer.from_str(json.dumps(json.loads(fast.to_str()) | {"pre_tokenizer": None}))
    elif kind == "first":
        fast.pre_tokenizer = pre_tokenizer
    return fast


def write_tokenizer(
    folder: Path,
    template: str,
    special: list[str],
    *,
    kind: str = "byte",
    eos: str = EOS,
    stops: list[str] | None = None,
) -> Path:
    """A directory for AutoTokenizer. `stops` are named in a generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fast = Tokenizer.from_str(trained(kind).to_str())
    names = dict.fromkeys([BOS, EOS, *special])
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names])
    fast.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": eos,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if stops is not None:
        ids = [fast.token_to_id(token) for token in stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def open_tokenizer(folder: Path, *args: Any, **options: Any) -> HFTokenizer:
    """What `write_tokenizer` writes, opened. Its template ends, so no process needs to try it."""
    tokenizer = HFTokenizer(write_tokenizer(folder, *args, **options))
    tokenizer._trial = ""
    return tokenizer
