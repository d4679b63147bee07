"""The model card says what a run did, and nothing of the machines that it ran on."""

from tiny_models import tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.evaluation.model_card import RunFacts, model_card
from jaxrl_llm.models.base import model_spec


def test_no_address_and_no_folder_is_published():
    judge = c.Judge(url="http://10.1.2.3:8000/v1", model="judge-70b", cache_file="/home/me/a.jsonl")
    config = c.Config(reward=c.RewardConfig(functions=(judge,)))
    facts = RunFacts(config=config, step=3, validation={})
    card = model_card(model_spec(tiny_config()), facts, "actor")
    assert "judge-70b" in card and "a.jsonl" in card
    assert "10.1.2.3" not in card and "/home/me" not in card
