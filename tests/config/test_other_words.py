"""Words of TRL and verl: each answer names keys that there are, and every error has it."""

import re

import pytest
from pydantic import ValidationError

from jaxrl_llm import config as c
from jaxrl_llm.launch.command_line import read_config
from jaxrl_llm.launch.config_keys import help_of, sections
from jaxrl_llm.launch.flags import TRAIN
from jaxrl_llm.typed_records.other_words import WORDS
from jaxrl_llm.typed_records.record import fields_of

KEYS = {key.name for _, _, keys in sections() for key in keys}


@pytest.mark.parametrize("word", WORDS)
def test_an_answer_names_keys_that_there_are(word):
    for key in re.findall(r"config\.([\w.]*\w)", WORDS[word]):
        assert key in KEYS or any(name.startswith(f"{key}.") for name in KEYS), key
    assert word not in fields_of(c.Config)  # a key of ours is no word of others


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("lr", "config.actor.optimizer.learning_rate"),
        ("actor.optimizer.lr", "config.actor.optimizer.learning_rate"),
        ("critic.optimizer.lr", "config.critic.optimizer.learning_rate"),
        ("warmup.optimizer.lr", "config.warmup.optimizer.learning_rate"),
        ("num_generations", "config.rollout.n"),
        ("data.max_completion_length", "config.data.max_response_length"),
        ("per_device_train_batch_size", "config.data.train_batch_size"),
        ("algorithm.beta", "config.algorithm.kl_loss_coef with config.algorithm.use_kl_loss=true"),
        ("kl_coef", "config.algorithm.kl_coef with config.algorithm.use_kl_in_reward=true"),
    ],
)
def test_a_word_of_trl_or_verl_is_answered_with_our_key(key, ours):
    with pytest.raises(c.ConfigError) as error:
        c.load_config("grpo", {key: 1})
    assert str(error.value).startswith(f"unknown key config.{key}: here it is {ours}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["--num_generations=8", "num_generations=8"])
def test_a_word_as_a_flag_is_answered_too(word):
    with pytest.raises(c.ConfigError, match=r"here it is config\.rollout\.n"):
        read_config(["--config=grpo", word], TRAIN)


def test_a_word_in_a_record_is_answered_too():
    with pytest.raises(ValidationError, match=r"lr: here it is config\.actor\.optimizer\."):
        c.OptimizerConfig(**{"lr": 1e-6})


def test_a_key_of_an_algorithm_that_has_it_is_no_unknown_word():
    dpo = c.apply_override(c.open_config("dpo"), "algorithm.beta", "0.2")
    assert dpo.algorithm == c.DPO(beta=0.2)


def test_help_of_a_part_shows_its_keys_alone():
    shown = help_of("rollout.filter_groups")
    keys = re.findall(r"^  ([\w.]+)  ", shown, re.MULTILINE)
    assert keys == [f"rollout.filter_groups.{name}" for name in fields_of(c.FilterGroupsConfig)]
    keys = re.findall(r"^  ([\w.]+)  ", help_of("lora"), re.MULTILINE)
    assert {"actor.lora.rank", "critic.lora.rank"} < {*keys}
    assert "clip_high  number ≥ 0; default 0.28" in help_of("algorithm=dapo")


def test_help_of_no_key_names_the_nearest():
    with pytest.raises(
        c.ConfigError, match="no key has rolout in its name; did you mean 'rollout'"
    ):
        help_of("rolout")
    with pytest.raises(c.ConfigError, match=r"num_generations .*here it is config\.rollout\.n"):
        help_of("num_generations")


@pytest.mark.parametrize("words", [["--help", "reference"], ["--config=ppo", "--help=reference"]])
def test_the_word_behind_help_is_the_part(words, capsys):
    with pytest.raises(SystemExit):
        TRAIN.read(words)
    shown = capsys.readouterr().out
    assert "reference.refresh_every" in shown and "rollout.n " not in shown
