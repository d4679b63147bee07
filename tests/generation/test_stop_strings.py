"""Stop strings against the decoded text after each token."""

import json

import numpy as np
import pytest
from pieces import PIECES, Pieces
from test_generation import R, assert_same_tokens, prompts, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.generation.completions import completions_of
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.stop_strings import stop_strings
from jaxrl_llm.plan.online import train_sampling
from jaxrl_llm.tokenizer import CharTokenizer, load_tokenizer

TEXT = "the answer </answer> is\n\n 42, été 中文 </answer>\n\n中 <answer>\n\nend</answer>" * 3
STOPS = ("</answer>", "\n\n", "中 ", "é", "swer> i")


def byte_level():
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>"]
    fast.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special),
    )
    return fast


def sentencepiece():
    letters = sorted(set(TEXT.replace(" ", "▁")) - set("中文"))
    pieces = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += ["▁an", "swer", "answer", "</", "▁</", "\n\n", "er>", "▁▁"]
    fast = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<eos>"])
    return fast


def write(fast, folder):
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def first_end(tokenizer, ids, stops):
    """How many tokens there are once the decoded text has a stop string; None if it never has."""
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length])
        if any(stop in text for stop in stops):
            return length
    return None


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_the_token_that_completes_a_string_in_the_text_ends_the_response(kind, tmp_path):
    tokenizer = write(kind(), tmp_path / "t")
    found = stop_strings(STOPS, tokenizer)
    rng = np.random.default_rng(0)
    ends = []
    for _ in range(150):
        ids = []
        for _ in range(rng.integers(1, 8)):
            stop = STOPS[rng.integers(len(STOPS))]
            place = rng.integers(len(stop))
            ids += tokenizer.encode(stop[place:] if rng.random() < 0.5 else stop[:place])
            # Any token; but sentencepiece decodes a run of wrong bytes as none of them.
            first = 0 if kind is byte_level else 257
            ids.append(int(rng.integers(first, tokenizer.vocab_size)))
        expected = first_end(tokenizer, ids, STOPS)
        mine = next(
            (n for n in range(1, len(ids) + 1) if found.are_in(np.array([ids]), np.array([n]))[0]),
            None,
        )
        assert mine == expected, [tokenizer.decode([i]) for i in ids]
        ends.append(expected)
    assert 20 < sum(end is None for end in ends) < 130
    assert len(set(ends)) > 8


def test_generation_ends_with_that_token():
    tokens, lengths, ids = prompts(9)
    stops = ("abab", "cb")
    plain = SamplingParams(max_new_tokens=R, stop_token_ids=(20,))
    strings = stop_strings(stops, Pieces())
    sampling = SamplingParams(max_new_tokens=R, stop_token_ids=(20,), stop_strings=strings)
    whole = run(tokens, lengths, ids, num_slots=3, sampling=plain)
    cut = run(tokens, lengths, ids, num_slots=3, sampling=sampling)
    assert_same_tokens(run(tokens, lengths, ids, num_slots=9, sampling=sampling), cut)
    counts = whole.mask.sum(axis=1).astype(int)
    ends = [first_end(Pieces(), whole.tokens[i, :n].tolist(), stops) for i, n in enumerate(counts)]
    assert 2 < sum(end is None for end in ends) < 7
    for i, end in enumerate(ends):
        length = end or counts[i]
        assert cut.mask[i].sum() == cut.lengths[i] == length
        np.testing.assert_array_equal(cut.tokens[i, :length], whole.tokens[i, :length])
        assert cut.finished[i] == (end is not None or whole.finished[i])
    completions = completions_of(Pieces(), sampling.stops, cut.tokens, cut.lengths, cut.logprobs)
    for completion, row, end in zip(completions, cut.tokens, ends, strict=True):
        if end is not None:
            assert completion.finished
            assert completion.text == "".join(PIECES[token] for token in row[:end])


def test_a_config_names_them():
    config = load_config("grpo", {"rollout.stop": ["</answer>", "\n\n"]})
    sampling = train_sampling(config, CharTokenizer())
    ids = CharTokenizer().encode("is </answer>")
    lengths = np.array([len(ids), len(ids) - 1])
    assert sampling.stops.are_in(np.array([ids] * 2), lengths).tolist() == [True, False]
    assert train_sampling(config, CharTokenizer()) == sampling  # so programs are found again


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["a|b"], r"config.rollout.stop: .*cannot be in a response: .*does not know '\|'"),
        ([""], "config.rollout.stop.0='': .*at least 1 character"),
        (["a" * 33], "at most 32 characters"),
        (["a"] * 17, "at most 16 items"),
    ],
)
def test_strings_that_cannot_be_in_a_response_are_refused(strings, message):
    with pytest.raises(ConfigError, match=message):
        train_sampling(load_config("grpo", {"rollout.stop": strings}), CharTokenizer())


def test_a_special_token_and_unknown_bytes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"special token 0.*stop_token_ids=\[0\]"):
        stop_strings(("x<eos>",), write(byte_level(), tmp_path / "bytes"))
    words = byte_level()
    words.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="its decoder is WordPiece.*stop_token_ids"):
        stop_strings(("x",), write(words, tmp_path / "words"))
