"""The model card says what a run did, and nothing of the machines that it ran on."""

from dataclasses import replace

from tiny_models import tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.config import load_config
from jaxrl_llm.evaluation.model_card import RunFacts, model_card
from jaxrl_llm.models.base import model_spec


def test_no_address_and_no_folder_is_published():
    judge = c.Judge(url="http://10.1.2.3:8000/v1", model="judge-70b", cache_file="/home/me/a.jsonl")
    config = c.Config(reward=c.RewardConfig(functions=(judge,)))
    facts = RunFacts(config=config, step=3, validation={})
    card = model_card(model_spec(tiny_config()), facts, "actor")
    assert "judge-70b" in card and "a.jsonl" in card
    assert "10.1.2.3" not in card and "/home/me" not in card


def test_sizes_and_tokenizer_that_weights_on_disk_replace_are_not_shown():
    config = load_config("ppo")
    facts = RunFacts(config=config, step=3, validation={})
    card = model_card(model_spec(tiny_config()), facts, "actor")
    assert '"actor.hf_config.hidden_size": 128' in card and '"data.tokenizer": "char"' in card
    facts = replace(facts, config=replace(config, actor=replace(config.actor, path="smollm2")))
    card = model_card(model_spec(tiny_config()), facts, "actor")
    assert "actor.hf_config" not in card and "tokenizer" not in card.partition("## Use")[0]
    assert '"critic.hf_config.hidden_size": 64' in card
