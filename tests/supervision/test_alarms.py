"""Each watcher fires on a series that goes wrong, and not on a healthy one."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrl_llm.config import AlarmsConfig, Config, ConfigError, apply_override, open_config
from jaxrl_llm.supervision.alarms import REARM, Alarms, Event, watchers
from jaxrl_llm.typed_records.record import fields_of

DOCS = Path(__file__).parents[2] / "docs"
HELD_OUT = "val-core/sums/reward/mean@1"
REWARD = "critic/score/mean"
Series = Callable[[int], float]


def wave(step: int) -> float:
    """A deterministic noise in [-1, 1]."""
    return ((step * 7919) % 21 - 10) / 10


# Watcher: (metric, healthy series, the same that goes wrong from step 61 on, first step it fires).
CASES: dict[str, tuple[str, Series, Series, int]] = {
    "nonfinite": ("actor/pg_loss", wave, lambda t: float("nan"), 61),
    "gradient_spike": ("actor/grad_norm", lambda t: 2 + wave(t), lambda t: 30.0, 61),
    "entropy": ("actor/entropy", lambda t: 0.5 / (1 + t / 10), lambda t: 0.0, 64),
    "kl": ("actor/kl_loss", lambda t: t / 200, lambda t: 3.0, 62),
    "update_kl": ("actor/ppo_kl", lambda t: 0.01 * wave(t), lambda t: 0.2, 61),
    "clip_fraction": ("actor/pg_clipfrac", lambda t: 0.1, lambda t: 0.7, 64),
    "ratio": ("actor/ratio_p01", lambda t: 0.8 + 0.1 * wave(t), lambda t: 0.125, 63),
    "mismatch": ("token_mult_prob_error", lambda t: 1.01 + 0.01 * wave(t), lambda t: 1.2, 62),
    "reward_std": (REWARD, lambda t: t / 100 + 0.05 * wave(t), lambda t: 0.7, 70),
    "reward_deviation": (REWARD, lambda t: t / 100 + wave(t) / 3, lambda t: 0.5 + 5 * (t % 2), 70),
    "zero_variance": ("frac_reward_zero_std", lambda t: 0.5 + t / 400, lambda t: 1.0, 69),
    "length_drift": (
        "response_length/mean",
        lambda t: 100 + t + 10 * wave(t),
        lambda t: 350.0,
        63,
    ),
    "cut_share": ("response_length/clip_ratio", lambda t: 0.1, lambda t: 1.0, 65),
    "masked_share": ("reward/masked_frac", lambda t: 0.02, lambda t: 0.5, 62),
    "environment_failures": ("env/masked_frac", lambda t: 0.02, lambda t: 0.5, 61),
    "no_tool_calls": ("tools/call_frequency", lambda t: 0.5 + 0.2 * wave(t), lambda t: 0.0, 70),
    "turn_drift": ("num_turns/mean", lambda t: 2 + 0.2 * wave(t), lambda t: 5.0, 63),
    "repetition": ("rollout/repetition", lambda t: 0.1, lambda t: 0.9, 63),
    "explained_variance": ("critic/vf_explained_var", lambda t: t / 100, lambda t: -4.0, 63),
    "host_memory": ("perf/process_memory_gb", lambda t: 8 + wave(t), lambda t: 30.0, 70),
    "device_memory": ("perf/memory_in_use_gb", lambda t: 40.0, lambda t: 70.0, 70),
    "step_time": ("perf/time_per_step", lambda t: 10 + 3 * wave(t), lambda t: 40.0, 63),
}


def fired(series: list[dict[str, float]], alarms: Alarms | None = None) -> list[Event]:
    alarms = alarms or Alarms(config=AlarmsConfig())
    return [e for step, metrics in enumerate(series, 1) for e in alarms.step(step, metrics)]


@pytest.mark.parametrize("name", CASES)
def test_a_watcher_fires_once_where_it_should(name: str) -> None:
    metric, healthy, wrong, first = CASES[name]
    series = [{metric: healthy(t) if t <= 60 else wrong(t)} for t in range(1, 80)]
    assert fired(series[:60]) == []
    (event,) = fired(series)
    assert (event.name, event.metric, event.step) == (name, metric, first)
    assert event.look_at and event.action == "warn"


def test_every_watcher_is_tested_and_has_settings() -> None:
    names = fields_of(AlarmsConfig)
    assert set(CASES) | {"reward_hacking"} == set(names) == set(watchers(AlarmsConfig()))


def runs_apart(held_out: list[float], rewards: list[float]) -> list[dict[str, float]]:
    """A validation after every ten steps of a reward."""
    return [
        {REWARD: reward + 0.01 * wave(step)} | ({HELD_OUT: score} if step == 9 else {})
        for score, reward in zip(held_out, rewards, strict=True)
        for step in range(10)
    ]


def test_reward_that_rises_while_held_out_scores_fall() -> None:
    rising = [0.2, 0.4, 0.6, 0.7, 0.8, 0.9]
    hacked = runs_apart([0.5, 0.7, 0.8, 0.6, 0.5, 0.4], rising)
    (event,) = fired(hacked)
    assert (event.name, event.step) == ("reward_hacking", 60)
    assert event.value == pytest.approx((0.8 - 0.6) / 0.8)
    # Both fall; a dip of two validations; noise within the threshold.
    assert fired(runs_apart([0.5, 0.7, 0.8, 0.6, 0.5, 0.4], [0.2, 0.4, 0.6, 0.5, 0.4, 0.3])) == []
    assert fired(runs_apart([0.5, 0.7, 0.8, 0.6, 0.5, 0.75], rising)) == []
    assert fired(runs_apart([0.5, 0.7, 0.8, 0.75, 0.7, 0.74], rising)) == []


def test_stored_learning_curves_are_quiet() -> None:
    rows = [json.loads(line) for line in (DOCS / "curves/ppo_smollm2.jsonl").open()]
    for seed in {row["seed"] for row in rows}:
        held_out = [row["accuracy"] for row in rows if row["seed"] == seed]
        assert fired(runs_apart(held_out, [0.01 * i for i in range(len(held_out))])) == []
    for line in (DOCS / "trl_curves.jsonl").open():
        rewards = json.loads(line).get("rewards", [])
        assert fired([{REWARD: reward} for reward in rewards]) == []


def test_an_alarm_rings_again_only_after_a_quiet_time() -> None:
    def steps(number: int, kl: float) -> list[dict[str, float]]:
        return [{"actor/ppo_kl": kl}] * number

    short = steps(1, 1.0) + steps(REARM - 1, 0.0) + steps(1, 1.0)
    assert [event.step for event in fired(short)] == [1]
    long = steps(1, 1.0) + steps(REARM, 0.0) + steps(1, 1.0)
    assert [event.step for event in fired(long)] == [1, REARM + 2]


def test_a_resumed_run_fires_the_same() -> None:
    """The state goes through JSON after each step. Memory of another process does not count."""
    config = AlarmsConfig()
    for name, (metric, healthy, wrong, _) in CASES.items():
        series = [{metric: healthy(t) if t <= 60 else wrong(t)} for t in range(1, 80)]
        found, state = [], Alarms(config=config).state()
        for step, metrics in enumerate(series, 1):
            alarms = Alarms(config=config)
            alarms.restore(json.loads(json.dumps(state, allow_nan=False)))
            found += alarms.step(step, metrics)
            state = alarms.state()
        expected = [] if name.endswith("_memory") else fired(series)
        assert [event.line() for event in found] == [event.line() for event in expected], name


def test_what_does_not_count() -> None:
    stale: dict[str, float] = {"token_mult_prob_error": 2.0, "rollout/staleness": 1.0}
    compiling: dict[str, float] = {"perf/time_per_step": 90.0, "perf/compilations": 1.0}
    small = [{"actor/grad_norm": 1e-3}] * 20 + [{"actor/grad_norm": 0.9}]
    usual = [{"perf/time_per_step": 5.0}] * 20
    assert fired([stale] * 20) == fired([*usual, *[compiling] * 9]) == fired(small) == []
    alarms = Alarms(config=apply_override(Config(), "alarms.update_kl", "off").alarms)
    assert fired([{"actor/ppo_kl": 9.0}], alarms) == []


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (
            "alarms.kl",
            "stp",
            "alarms.kl.action=stp: expected one of off, warn, save, stop; did you",
        ),
        ("alarms.kl.action", "quit", "expected one of off, warn, save, stop"),
        ("alarms.kl.threshold", "-1", "must be 0 or more"),
        ("alarms.mismatch.threshold", "1", "must be above 1; 1.05 works"),
        ("alarms.cut_share.threshold", "50", "must be at most 1"),
        ("alarms.entropi", "off", "did you mean 'config.alarms.entropy'"),
    ],
)
def test_a_wrong_setting_gets_the_remedy(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        apply_override(open_config("ppo"), key, text)


def test_one_word_sets_a_watcher_or_all() -> None:
    one = apply_override(open_config("ppo"), "alarms.kl", "stop").alarms
    assert one.kl.action == "stop" and one.kl.threshold == 1.0 and one.entropy.action == "warn"
    every = apply_override(open_config("ppo"), "alarms", "off").alarms
    assert {getattr(every, name).action for name in fields_of(every)} == {"off"}


def test_the_page_has_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", (DOCS / "alarms.md").read_text(), re.M)
    found = {name: None if number == "–" else float(number) for name, number in rows}
    config = AlarmsConfig()
    assert found == {
        name: getattr(getattr(config, name), "threshold", None) for name in fields_of(config)
    }
