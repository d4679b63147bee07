"""The rows that `--dry_run --show` prints."""

import json
from pathlib import Path

import turn_templates as templates
from PIL import Image
from turn_tokenizers import open_tokenizer

from jaxrl_llm.data.dataset import Sources
from jaxrl_llm.data.shown_rows import shown_rows
from jaxrl_llm.images import ImageInput, see_images
from jaxrl_llm.tokenizer import CharTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
USER, SURE = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Sure."}


def lines(folder, rows, purpose, tokenizer, count=2):
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = Sources(files=(str(folder / "x.jsonl"),))
    return list(shown_rows(sources, purpose, tokenizer, count, keep_thinking=False))


def test_a_conversation_shows_its_turns_and_the_ends(tmp_path):
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = open_tokenizer(tmp_path / "t", templates.CHATML, special)
    first, name, *shown, ends = lines(tmp_path, [{"messages": [USER, SURE]}], "examples", tokenizer)
    assert first.startswith("tokens of the first rows")
    assert name == f"{tmp_path}/x.jsonl, rows of the format messages"
    assert [line.replace("\u00b7", "") for line in shown] == [
        shown[0],
        "    chat template: <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n",
        "    message 1: [Sure.<|im_end|>]",
        "    chat template: \\n",
    ]
    assert shown[0].endswith(" tokens, 3 learned") or "learned" in shown[0]
    assert "<|im_end|> (" in ends and "chat template)" in ends and "files of the model)" in ends


def test_the_tokens_of_an_image_are_one_word(tmp_path):
    char = CharTokenizer()
    see_images(char, ImageInput(token_id=100, size=8, patch=2, scale=2, most=2))
    Image.new("RGB", (9, 5)).save(tmp_path / "a.png")
    row = {"prompt": "a<image>b", "completion": "c", "images": [str(tmp_path / "a.png")]}
    _, _, *shown, _ = lines(tmp_path, [row], "prompts", char)
    prompt = "    prompt: a\u00b7<image: 4 tokens>\u00b7b"
    assert shown == ["  row 0: 6 tokens, 0 learned", prompt]
    _, _, *shown, _ = lines(tmp_path, [row], "examples", char)
    assert shown[:3] == ["  row 0: 8 tokens, 2 learned", prompt, "    completion: [c]"]


def test_pairs_prompts_and_bad_rows(tmp_path):
    char = CharTokenizer()
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "", "chosen": "2"}]
    _, name, *shown, ends = lines(tmp_path, rows, "preferences", char)
    assert name.endswith("format preference") and ends.endswith("<|eos|> (1, character tokenizer)")
    assert shown == [
        "  row 0: 6 tokens, 2 learned",
        "    prompt: 1\u00b7+\u00b71\u00b7=",
        "    completion: [2]",
        "    end token: [<|eos|>]",
        "  row 0: 6 tokens, 2 learned",
        "    prompt: 1\u00b7+\u00b71\u00b7=",
        "    completion: [3]",
        "    end token: [<|eos|>]",
        "  row 1 is bad: column 'rejected' is missing",
    ]
    _, _, *shown, _ = lines(tmp_path, rows, "prompts", char, count=1)
    assert shown == ["  row 0: 4 tokens, 0 learned", "    prompt: 1\u00b7+\u00b71\u00b7="]
