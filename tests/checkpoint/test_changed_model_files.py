"""Model folders with changed files: what is read, or an error that names the file."""

import json
from functools import partial

import pytest
from byte_changes import changed as changed_bytes
from byte_changes import refused_changes
from chat_tokenizer import write_chat_tokenizer
from tiny_models import CONFIGS, write_directory

from jaxrl_llm.checkpoint.huggingface import load_model_config, load_model_kind
from jaxrl_llm.checkpoint.safetensors_files import read_tensors, stored_tensors
from jaxrl_llm.tokenizer import load_tokenizer

VALUES = (
    None, True, -1, 0, 10**9, 10**30, 1e308, "text", [], {}, [1, 2], {"a": 1}, 1.5, [[]],
    float("nan"),
)  # fmt: skip
INDEX = "model.safetensors.index.json"


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


def changed_json(good, draw):
    return json.dumps(changed(json.loads(good), draw)).encode()


def read_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.decode(tokenizer.encode("1 + 2 = 3"))
    if tokenizer.has_chat_template:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("changes", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_changed_config_is_read_or_refused(tmp_path, family, changes):
    folder = write_directory(tmp_path / "model", CONFIGS[family])

    def read():
        load_model_config(folder)
        load_model_kind(folder)

    assert refused_changes(folder / "config.json", read, changes, changed_json) > changes // 4


@pytest.mark.parametrize("changes", [100, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_changed_bytes_of_a_model_are_read_or_refused(tmp_path, name, changes):
    folder, config = tmp_path / "model", CONFIGS["qwen2"]
    write_directory(folder, config)
    tensors = sorted(stored_tensors(folder))
    if name == INDEX:
        weights = dict.fromkeys(tensors, "model.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))

    def read():
        load_model_config(folder)
        stored = stored_tensors(folder)
        for name in tensors:
            if name not in stored:
                raise ValueError(f"{name} is missing, which the import names")
        for _, value in read_tensors(stored.values()):
            value.sum()

    assert refused_changes(folder / name, read, changes, changed_bytes) > changes // 10


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


@pytest.mark.parametrize("changes", [40, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.timeout(3000)
def test_a_changed_tokenizer_is_read_or_refused(tmp_path, changes):
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    read = partial(read_tokenizer, folder)
    file = folder / "tokenizer_config.json"
    assert refused_changes(file, read, changes, changed_json) > changes // 8


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_changed_bytes_of_a_tokenizer_are_read_or_refused(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    read = partial(read_tokenizer, folder)
    assert refused_changes(folder / "tokenizer.json", read, 2000, changed_bytes) > 200


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
