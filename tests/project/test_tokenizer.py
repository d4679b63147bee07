"""The character tokenizer against transformers, and the Hugging Face wrapper by hand."""

import json
import string
import subprocess
import sys
from types import SimpleNamespace

import pytest
from chat_tokenizer import TEMPLATE, write_chat_tokenizer
from turn_tokenizers import write_tokenizer

from jaxrl_llm import tokenizer as tokenizers_file
from jaxrl_llm.tokenizer import (
    ALPHABET,
    CharTokenizer,
    HFTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
)

TEXTS = ["7+2-5=", " a  b \n\n c", "It's 3.5, isn't it ?", 'x{}[]()<>"\\~^_%$#@&!;:', ALPHABET]
CONVERSATION = [{"role": "user", "content": "hi"}]


def test_char_tokenizer_has_a_small_vocabulary_and_round_trips():
    tokenizer = CharTokenizer()
    assert tokenizer.vocab_size == 96
    assert set(string.ascii_letters + string.digits + "+-*/= \n.,:;?!'\"()") <= set(ALPHABET)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode("7+2=")) == 4
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids) == (0, 1, (1,))


def test_char_tokenizer_shows_special_tokens_only_when_asked():
    tokenizer = CharTokenizer()
    ids = [*tokenizer.encode("7"), 1, 0]
    assert tokenizer.decode(ids) == "7"
    assert tokenizer.decode(ids, skip_special=False) == "7<|eos|><|pad|>"


def test_char_tokenizer_leaves_out_ids_that_only_the_model_has(tmp_path):
    """As Hugging Face tokenizers do where a model's vocabulary is padded."""
    tokenizer = CharTokenizer()
    ids = [*tokenizer.encode("1+2"), len(tokenizer.encode(ALPHABET)) + 2, 151_935]
    tokenizer.save(tmp_path)
    assert tokenizer.decode(ids) == "1+2" == load_tokenizer(str(tmp_path)).decode(ids)


@pytest.mark.parametrize("text, name", [("7+é", "U+00E9"), ("a|b", "U+007C"), ("\t", "U+0009")])
def test_char_tokenizer_names_the_character_that_it_refuses(text, name):
    with pytest.raises(ValueError, match=name.replace("+", r"\+")):
        CharTokenizer().encode(text)


def test_char_tokenizer_refuses_conversations():
    assert not CharTokenizer().has_chat_template
    with pytest.raises(ValueError, match="no chat template: give prompts as plain strings"):
        CharTokenizer().apply_chat_template(CONVERSATION)


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "qwen3", "mistral"])
def test_auto_tokenizer_opens_the_saved_char_tokenizer(tmp_path, model_type):
    from transformers import AutoTokenizer

    ours = CharTokenizer()
    ours.save(tmp_path)
    if model_type:  # as in an exported model, where transformers also looks at the model's type
        config = {"model_type": model_type, "vocab_size": ours.vocab_size}
        (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.pad_token_id, theirs.eos_token_id) == (96, 0, 1)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.decode([*ours.encode("12"), 1, 0], skip_special_tokens=True) == "12"
    if model_type != "qwen2":  # there transformers drops an unknown character
        with pytest.raises(Exception, match="Unk token"):
            theirs("café")


def test_load_tokenizer_knows_a_saved_char_tokenizer(tmp_path):
    CharTokenizer().save(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), CharTokenizer)
    assert isinstance(load_tokenizer("char"), CharTokenizer)


def test_hf_tokenizer_matches_auto_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    folder = write_chat_tokenizer(tmp_path / "chat")
    tokenizer = load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, HFTokenizer) and isinstance(tokenizer, Tokenizer)
    assert isinstance(CharTokenizer(), Tokenizer)
    assert tokenizer.encode("café , no") == theirs.encode("café , no", add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("café , no")) == "café , no"
    assert tokenizer.encode("<|im_end|>") == [3]
    assert tokenizer.vocab_size == len(theirs) == 4 + 1 + 95 + 1
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.stop_ids) == (3, None, (3,))
    assert tokenizer.pad_id == 3  # the directory names no padding token


def test_hf_tokenizer_renders_the_chat_template(tmp_path):
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "chat"))
    assert tokenizer.has_chat_template
    question = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.apply_chat_template(CONVERSATION) == question + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=False) == question
    begun = [*CONVERSATION, {"role": "assistant", "content": "The answer"}]
    continued = tokenizer.apply_chat_template(
        begun, add_generation_prompt=False, continue_final_message=True
    )
    assert continued == question + "<|im_start|>assistant\nThe answer"
    with pytest.raises(ValueError, match="refuses the conversation: unknown role wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "hi"}])


def test_hf_tokenizer_without_template_and_with_bos(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "base", template=None, add_bos=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id == 1
    assert 1 not in tokenizer.encode("hi")
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template(CONVERSATION)


@pytest.mark.parametrize("listed, expected", [([3, 2], (3, 2)), ([2], (3, 2)), (2, (3, 2))])
def test_stop_ids_come_from_the_generation_config(tmp_path, listed, expected):
    folder = write_chat_tokenizer(tmp_path / "chat")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert load_tokenizer(folder).stop_ids == expected


def test_stop_ids_come_from_the_config_where_there_is_no_generation_config(tmp_path):
    """A merged or saved again folder has no other file; its text model may be a part of it."""
    folder = write_chat_tokenizer(tmp_path / "chat")
    text = {"text_config": {"eos_token_id": 2}}
    for config in ({"eos_token_id": [2, 3]}, text, text | {"eos_token_id": None}):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        assert load_tokenizer(folder).stop_ids == (3, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert load_tokenizer(folder).stop_ids == (3,)
    (folder / "generation_config.json").write_text('{"max_length": 9}')
    assert load_tokenizer(folder).stop_ids == (3, 2)


def test_a_panic_of_tokenizers_is_a_message(tmp_path, monkeypatch):
    """It is no Exception, so it passed every reader."""
    panic = type("PanicException", (BaseException,), {})

    def panics(*_, **__):
        raise panic("called `Option::unwrap()` on a `None` value")

    broken = SimpleNamespace(from_pretrained=panics)
    monkeypatch.setattr(tokenizers_file, "_auto_tokenizer", lambda: broken)
    with pytest.raises(ValueError, match="no tokenizer could be opened from .*unwrap"):
        HFTokenizer(tmp_path)


def test_text_is_split_as_tokenizer_json_says(tmp_path, caplog):
    """For a qwen2 folder transformers takes Qwen2's splitting, whatever the file has."""
    from tokenizers import Tokenizer as FileTokenizer
    from tokenizers import pre_tokenizers

    folder = write_tokenizer(tmp_path / "t", TEMPLATE, ["<|im_end|>"])
    fast = FileTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    fast.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = load_tokenizer(folder)
    text = "The weather in Lima"
    assert tokenizer.encode(text) == fast.encode(text, add_special_tokens=False).ids
    assert "transformers splits text otherwise than" in caplog.text
    tokenizer.save(tmp_path / "copy")
    copy = FileTokenizer.from_file(str(tmp_path / "copy" / "tokenizer.json"))
    assert copy.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    assert load_tokenizer(tmp_path / "copy").apply_chat_template(CONVERSATION)


@pytest.mark.parametrize("listed", [-1, "</s>", [3, None], True])
def test_a_stop_id_that_is_no_id_is_refused(tmp_path, listed):
    folder = write_chat_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(
        ValueError, match="generation_config.json has the eos_token_id .*not a token"
    ):
        load_tokenizer(folder)


def test_special_ids_outside_of_the_models_vocabulary_are_refused_with_both_sizes(tmp_path):
    folder = write_chat_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 120]}))
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, 121)
    check_vocabulary(tokenizer, 101, stop_ids=(3, 100))
    check_vocabulary(CharTokenizer(), 2)
    message = r"the stop id 120 is outside of the model's vocabulary of 120 .*tokenizer has 101\)"
    with pytest.raises(ValueError, match=message):
        check_vocabulary(tokenizer, 120)
    with pytest.raises(ValueError, match="the stop id 101 is outside"):
        check_vocabulary(tokenizer, 101, stop_ids=(3, 101))
    with pytest.raises(ValueError, match="the padding id 3 is outside .* vocabulary of 3 tokens"):
        check_vocabulary(tokenizer, 3)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    new = {"pad_token": "<new>"}  # added without a row of the embedding
    (folder / "tokenizer_config.json").write_text(json.dumps(config | new))
    with pytest.raises(
        ValueError, match="the padding id 101 is outside .* vocabulary of 101 tokens"
    ):
        check_vocabulary(load_tokenizer(folder), 101)


def test_text_outside_of_the_models_vocabulary_is_refused(tmp_path):
    for tokenizer in (load_tokenizer(write_chat_tokenizer(tmp_path)), CharTokenizer()):
        whole, digest = tokenizer.encode("12z"), tokenizer.digest()
        check_vocabulary(tokenizer, max(whole))
        assert tokenizer.encode("12") == whole[:2]
        with pytest.raises(ValueError, match=f"the id {max(whole)}, outside of .* to 'z'"):
            tokenizer.encode("12z")
        assert tokenizer.digest() == digest
        check_vocabulary(tokenizer, tokenizer.vocab_size)
        assert tokenizer.encode("12z") == whole


def test_saved_hf_tokenizer_gives_the_same_ids_and_template(tmp_path):
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "chat"))
    tokenizer.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    text = tokenizer.apply_chat_template(CONVERSATION)
    assert copy.apply_chat_template(CONVERSATION) == text
    assert copy.encode(text) == tokenizer.encode(text)


def test_bad_directories_are_refused_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer could be opened"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(ValueError, match="names no eos_token"):
        load_tokenizer(write_chat_tokenizer(tmp_path / "endless", eos=False))


def test_the_char_tokenizer_needs_neither_transformers_nor_jax():
    code = (
        "import sys; from jaxrl_llm.tokenizer import load_tokenizer; load_tokenizer('char');"
        "assert not {'jax', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
