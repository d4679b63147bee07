"""A model that cannot be built is refused before jax is imported, with the key of the config."""

import json
import re
import subprocess
import sys

import pytest

from jaxrl_llm.config import ConfigError, load_config
from jaxrl_llm.launch.described_models import check_models
from jaxrl_llm.models.config_json import misspelt_key


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hf_config.hidden_size": "abc"}, "hf_config.hidden_size='abc': must be a whole number"),
        (
            {"hf_config.hiden_size": 64},
            "unknown key config.actor.hf_config.hiden_size; did you mea",
        ),
        ({"hf_config.num_attention_heads": 0}, "hf_config.num_attention_heads=0: must be"),
        (
            {"hf_config.num_attention_heads": -3},
            "hf_config.num_attention_heads=-3: must be a whole",
        ),
        (
            {"hf_config.tie_word_embeddings": "no"},
            "tie_word_embeddings='no': must be true",
        ),
        ({"hf_config.num_attention_heads": 3}, "config.actor.hf_config: num_heads 3 is not"),
        ({"hf_config.rope_scaling": {"factor": -1.0}}, "hf_config.rope_scaling.factor=-1.0: must"),
        ({"hf_config.model_type": "lama"}, "architecture model_type 'lama' is not supported"),
        (
            {"lora.rank": 2, "lora.targets": "q_prj"},
            "config.actor.lora.targets: no module is called 'q_prj' or matches it; did you mean",
        ),
    ],
)
def test_settings_of_a_model_that_cannot_be_built(overrides, message):
    config = load_config("grpo", {f"actor.{key}": value for key, value in overrides.items()})
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_models(config)


def test_a_folder_is_named_with_its_file(tmp_path):
    (tmp_path / "model.safetensors").touch()
    content = {"model_type": "llama", "hidden_size": "64"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = load_config("grpo", {"actor.path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"config.actor.path=.*/config.json has hidden_size='64'"):
        check_models(config)


@pytest.mark.parametrize("content", ["{", "[" * 99999, "[]"])
def test_a_description_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(content)
    config = load_config("grpo", {"actor.path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"actor.path=.*config.json (is|holds).*not .*again"):
        check_models(config)


def test_a_run_goes_on_from_a_checkpoint_alone(tmp_path):
    config = load_config("grpo", {"resume": str(tmp_path)})
    with pytest.raises(ConfigError, match="no checkpoint that was written to its end; give a"):
        check_models(config)


def test_a_model_is_checked_without_jax():
    code = (
        "import sys\n"
        "from jaxrl_llm.config import load_config\n"
        "from jaxrl_llm.launch.runtime import start\n"
        "try: start(load_config('grpo', {'actor.hf_config.hidden_size': 0}))\n"
        "except ValueError as error: print(error, 'jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "hidden_size=0: must be" in done.stdout and done.stdout.endswith("False\n"), done


def test_keys_of_published_configs_are_not_taken_for_mistakes():
    keys = ("intermediate_size_mlp", "_sliding_window_pattern", "original_max_position_embeddings")
    assert misspelt_key(dict.fromkeys(keys, 1)) is None
    assert misspelt_key({"hiden_size": 1}) == ("hiden_size", "hidden_size")
