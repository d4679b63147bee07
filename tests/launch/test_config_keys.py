"""The listing of the keys: docs/config.md, --help, and that no key is left out."""

import re
from pathlib import Path

from documented_metrics import documented

from jaxrl_llm.config import AlarmsConfig, Config, RewardConfig, RewardModelConfig, SupervisedConfig
from jaxrl_llm.config.algorithms import ALGORITHMS, Clipped
from jaxrl_llm.launch.config_keys import GIVEN, comments, help_text, page, sections
from jaxrl_llm.typed_records.record import Record, fields_of
from jaxrl_llm.typed_records.tree import entries, every

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_current_one():
    remedy = "python -m jaxrl_llm.launch.config_keys > docs/config.md"
    assert (ROOT / "docs" / "config.md").read_text() == page(), remedy


def test_every_key_is_listed_with_its_own_default():
    listed = {key.name: key for _, _, keys in sections() for key in keys}
    training = RewardModelConfig(training=SupervisedConfig())
    whole = Config(warmup=SupervisedConfig(), reward=RewardConfig(model=training))
    keys = {
        f"{key}.{name}".removeprefix(".")
        for key, record in every(whole, Record)
        for name, value in entries(record)
        if not isinstance(value, Record)
    }
    listed_once = ("reward.model.training.", "validation.grader.")
    assert {key for key in keys if not key.startswith(listed_once)} - set(GIVEN) <= set(listed)
    found = [(listed[key].type, listed[key].default) for key in ("rollout.n", "algorithm")]
    assert found == [("integer ≥ 1", "1"), ("kind", "ppo")]
    # The critic's own default, not any optimizer's.
    assert listed["critic.optimizer.learning_rate"].default == "1e-05"
    assert listed["actor.optimizer.learning_rate"].default == "1e-06"


def test_comments_are_those_of_the_source():
    found = comments(SupervisedConfig)
    assert found["stop_at"] == "held-out accuracy at which the training ends early; 0: never"
    of_page = page()
    above = "Device numbers of roles with their own devices"  # lines above the field
    assert above in of_page
    for kind in ALGORITHMS:
        assert f"### algorithm = {kind.kind}\n" in of_page, kind.kind


def test_every_key_has_a_meaning():
    assert [key.name for _, _, keys in sections() for key in keys if not key.comment] == []


def test_a_key_without_a_comment_has_that_of_its_base_or_of_the_record():
    meanings = {key.name: key.comment for _, _, keys in sections() for key in keys}
    assert meanings["alarms.kl.threshold"] == comments(AlarmsConfig)["kl"]
    of_dapo = next(keys for title, _, keys in sections() if title == "algorithm = dapo")
    assert {key.name: key.comment for key in of_dapo}["algorithm.clip_high"] == (
        comments(Clipped)["clip_high"]
    )


def test_troubleshooting_names_keys_and_metrics_that_there_are():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    listed = {key.name for _, _, keys in sections() for key in keys}
    listed |= {f"algorithm.{name}" for kind in ALGORITHMS for name in fields_of(kind)}
    metrics = documented()
    named = re.findall(r"`([a-z][\w./<>-]*(?:=[\w.]+)?)`", page)
    spans = {span.partition("=")[0] for span in named}
    groups = {name.partition(".")[0] for name in listed}
    keys = {s for s in spans if "." in s and s.partition(".")[0] in groups} | {"max_staleness"}
    assert len(keys) > 25 and keys <= listed, keys - listed
    numbers = {span for span in spans if "/" in span}
    assert len(numbers) > 15
    assert [name for name in numbers if not metrics.fullmatch(name.replace("<source>", "x"))] == []


def test_help_fits_a_terminal():
    lines = help_text().splitlines()
    words = [line for line in lines if len(line) > 100 and re.search(r"\s\S+\s", line.strip())]
    introductions = [line for line in words if not line.startswith("  ")]
    assert words == introductions  # titles are not wrapped
