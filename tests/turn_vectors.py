"""Conversations in token ids, recorded with SmolLM2's and Qwen3's own tokenizers."""

import json
from pathlib import Path

from turn_tokenizers import open_tokenizer

from jaxrl_llm.turns import Turns

VECTORS = Path(__file__).parent / "golden"
CHATML = ["<|im_start|>", "<|im_end|>"]


class Recorded:
    """A tokenizer that knows the texts of one case, and renders with a template."""

    eos_id, template_name = -1, "the chat template"

    def __init__(self, case, folder, template):
        self._case = case
        self._renderer = open_tokenizer(folder, template, CHATML)
        self._texts = {int(i): text for i, text in case["pieces"].items()}
        self.model_stop_ids = (case["end_of_turn_id"],)
        self.added_tokens = {"<|im_end|>": (case["end_of_turn_id"], True)}
        self.apply_chat_template = self._renderer.apply_chat_template

    def encode(self, text):
        return self._case["encodings"][text]

    def encode_parts(self, text, places):
        (place,), ids = places, self.encode(text)
        cut = self._case["dummies"][text]
        assert text[place:] == self.decode(ids[cut:])  # the recorded cut
        return [ids[:cut], ids[cut:]]

    def decode(self, ids):
        return "".join(self._texts[i] for i in ids)


def recorded(name):
    """The case of that name."""
    file = VECTORS / f"turns_{name.partition('_')[0]}.json"
    cases = json.loads(file.read_text())["cases"]
    return next(case for case in cases if case["name"] == name)


def check_suffix(name, folder, template):
    """ids = prompt + sampled + suffix + sampled, as recorded."""
    case = recorded(name)
    turn = case["turns"][0]
    full = next(t for t, ids in case["encodings"].items() if ids == turn["dummy_full_ids"])
    tokenizer = Recorded({**case, "dummies": {full: turn["cut"]}}, folder, template)
    turns = Turns(tokenizer)  # the recorded dummies have no tools
    names = [message["name"] for message in turn["new_messages"] if message["role"] == "tool"]
    suffix = turns.suffix(turn["new_messages"], calls=names, sampled_stop=turn["sampled_ids"][-1])
    assert suffix == turn["suffix_ids"]
    sampled = [turn["sampled_ids"] for turn in case["turns"]]
    assert case["prompt_ids"] + sampled[0] + suffix + sampled[1] == case["ids"]
    prompt = Turns(tokenizer, case["tools"]).prompt(case["first_messages"])
    assert tokenizer.encode(prompt) == case["prompt_ids"]


def check_cut_turn(name, folder, template):
    """A turn that was cut at the token limit ends its row, and is continued where it stands."""
    case = recorded(name)
    (turn,) = case["turns"]
    tokenizer = Recorded(case, folder, template)
    turns, asked = Turns(tokenizer), case["first_messages"]
    prompt = tokenizer.encode(turns.prompt(asked))
    assert prompt + turn["sampled_ids"] == case["ids"]
    assert case["end_of_turn_id"] not in turn["sampled_ids"]
    continued = turns.prompt([*asked, {"role": "assistant", "content": turn["sampled_text"]}])
    assert continued == tokenizer.decode(case["ids"])
