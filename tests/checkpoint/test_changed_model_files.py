"""Model folders with changed files: what is read, or an error that names the file."""

import json
import random

import pytest
from chat_tokenizer import write_chat_tokenizer
from tiny_models import CONFIGS, write_directory

from jaxrl_llm.checkpoint.huggingface import load_model_config, load_model_kind
from jaxrl_llm.tokenizer import load_tokenizer

VALUES = (
    None, True, -1, 0, 10**9, 10**30, 1e308, "text", [], {}, [1, 2], {"a": 1}, 1.5, [[]],
    float("nan"),
)  # fmt: skip
CHANGES = 300


def changed(content, draw):
    """One value of a JSON tree is another one, or is missing."""
    content = json.loads(json.dumps(content))
    places = list(_places(content))
    holder, key = draw.choice(places)
    if isinstance(holder, dict) and draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)
    return content


def _places(tree):
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_changed_config_is_read_or_refused(tmp_path, family):
    folder = write_directory(tmp_path / "model", CONFIGS[family])
    file, draw, refused = folder / "config.json", random.Random(0), 0
    good = json.loads(file.read_text())
    for _ in range(CHANGES):
        file.write_text(json.dumps(changed(good, draw)))
        try:
            load_model_config(folder)
            load_model_kind(folder)
        except ValueError:
            refused += 1
    assert refused > CHANGES // 4


@pytest.mark.parametrize("text", ["null", "[]", '"x"', "{", "[" * 10**5, "\xff"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_that_is_no_object_is_named(tmp_path, name, text):
    folder = write_directory(tmp_path / "model", CONFIGS["qwen2"])
    write_chat_tokenizer(folder)
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=name):
        load_model_config(folder)
        load_tokenizer(folder)


def test_many_layers_take_no_memory(tmp_path):
    folder = write_directory(tmp_path / "model", CONFIGS["qwen2"])
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match=r"num_hidden_layers=1000000000.*up to 10,000"):
        load_model_config(folder)


def test_a_changed_tokenizer_is_read_or_refused(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    file, draw, refused = folder / "tokenizer_config.json", random.Random(0), 0
    good = json.loads(file.read_text())
    for _ in range(40):
        file.write_text(json.dumps(changed(good, draw)))
        try:
            tokenizer = load_tokenizer(folder)
            if tokenizer.has_chat_template:
                tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
        except ValueError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ undefined.x.y }}", "{% for x in 3 %}{% endfor %}", "{{ ''.__class__ }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'x' %}", "{{ x"],
)  # fmt: skip
def test_a_template_that_raises_is_refused(tmp_path, template):
    folder = write_chat_tokenizer(tmp_path / "tokenizer", template=template)
    tokenizer = load_tokenizer(folder)
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    except ValueError as error:
        assert "chat template" in str(error)
    else:
        assert "class" not in text
