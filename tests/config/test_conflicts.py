"""Each pair of settings that do not work together is refused."""

import pytest

from jaxrl_llm.config import Config, ConfigError, apply_overrides, load_config
from jaxrl_llm.config.rules.conflicts import Conflict, Setting, conflicts, pairs_of

# A model of each kind, so that there is every pair.
MODELS = {
    "teacher": "{path: org/teacher}",
    "models": "[{name: cost, kind: causal_lm, path: org/model}]",
}
BASE = apply_overrides(load_config("grpo", {"warmup": None}), MODELS)
# Values of each key in conflict, of which one makes its setting hold.
VALUES = {
    "actor.attention": ("cudnn",),
    "actor.base_dtype": ("bfloat16",),
    "actor.lora": ("{rank: 8}",),
    "actor.lora.dora": ("true",),
    "actor.lora.dropout": ("0.1",),
    "actor.lora.merge": ("false",),
    "actor.lora.rank": ("0",),
    "actor.micro_batch_size": ("8",),
    "actor.micro_batch_tokens": ("4096",),
    "actor.residual_dtype": ("bfloat16",),
    "actor.router_aux_loss_by_layer": ("true",),
    "actor.router_aux_loss_coef": ("0", "0.1"),
    "actor.router_bias_rate": ("0.1",),
    "actor.router_z_loss_coef": ("0.1",),
    "actor.scan_layers": ("true",),
    "actor.vision.train": ("all",),
    "algorithm": ("dpo", "grpo"),
    "critic.attention": ("cudnn",),
    "critic.base_dtype": ("bfloat16",),
    "critic.lora.dora": ("true",),
    "critic.lora.dropout": ("0.1",),
    "critic.lora.merge": ("false",),
    "critic.lora.rank": ("0",),
    "critic.micro_batch_size": ("8",),
    "critic.micro_batch_tokens": ("4096",),
    "data.curriculum": ("", "level"),
    "data.curriculum_steps": ("3",),
    "data.max_images": ("0", "1"),
    "data.num_workers": ("2",),
    "data.priority": ("spread",),
    "data.shuffle": ("false",),
    "data.streaming": ("true",),
    "exact": ("strict",),
    "max_staleness": ("0", "1"),
    "mesh.data": ("2",),
    "mesh.expert": ("2",),
    "mesh.fsdp": ("2",),
    "mesh.pipeline": ("1", "2"),
    "mesh.pipeline_micro_batches": ("2",),
    "mesh.pipeline_rounds": ("2",),
    "mesh.sequence": ("2",),
    "mesh.tensor": ("2",),
    "models.0.attention": ("cudnn",),
    "models": ("[{name: cost, kind: causal_lm, path: org/model}]",),
    "models.0.kind": ("causal_lm", "scalar"),
    "models.0.teacher_weight": ("1",),
    "models.0.weight": ("1",),
    "precompute_reference": ("true",),
    "node_groups": ("{train: {}}",),
    "partial_rollouts": ("2",),
    "placement": ("auto", "{critic: 1}"),
    "reference.path": ("org/other",),
    "reference.refresh_every": ("2",),
    "reward.functions": ("[]",),
    "reward.process_rewards": ("true",),
    "reward.failure_value": ("-1",),
    "reward.on_failure": ("mask",),
    "rollout.mask_truncated": ("true",),
    "rollout.tools": ("calculator",),
    "rollout.environment": ("guess",),
    "rollout.earlier_thinking": ("fork",),
    "rollout.max_rows": ("1",),
    "rollout.max_tool_calls": ("1",),
    "rollout.program": ("true now",),
    "rollout.dtype": ("bfloat16",),
    "rollout.filter_groups.enable": ("true",),
    "rollout.n": ("1",),
    "rollout.quantization": ("float8",),
    "teacher": ("{}",),
    "teacher.attention": ("cudnn",),
    "teacher.residual_dtype": ("bfloat16",),
    "teacher.scan_layers": ("true",),
}
PAIRS = [(pair.one.key, pair.other.key, pair.why) for pair in pairs_of(BASE)]


def pair_in(config: Config, row: tuple[str, str, str]) -> Conflict:
    """The pair of a row in another config, whose models may be others."""
    (found,) = (p for p in pairs_of(config) if (p.one.key, p.other.key, p.why) == row)
    return found


def turned_on(config: Config, row: tuple[str, str, str], which: str) -> Config:
    """`config` with one setting of a pair."""

    def setting(config: Config) -> Setting:
        return getattr(pair_in(config, row), which)

    if setting(config).holds(config):
        return config
    key = setting(config).key
    begin = {f"{key.partition('.')[0]}.lora.rank": "8"} if ".lora." in key else {}
    made = [apply_overrides(config, {**begin, key: value}) for value in VALUES[key]]
    (found, *_) = (each for each in made if setting(each).holds(each))
    return found


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_pair_is_refused(row):
    config = turned_on(turned_on(BASE, row, "one"), row, "other")
    pair = pair_in(config, row)
    assert pair.one.holds(config) and pair.other.holds(config)
    assert pair.fault(config) in conflicts(config)
    with pytest.raises(ConfigError, match="does not work with"):
        load_config(config)


def test_every_value_is_of_a_pair():
    assert set(VALUES) == {key for one, other, _ in PAIRS for key in (one, other)}


def test_packaged_settings_are_in_no_conflict():
    assert not list(conflicts(BASE))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"data.curriculum": "level", "data.streaming": "true"},
            "config.data.curriculum=level does not work with config.data.streaming=true: it reads "
            "the column of all rows before the first step",
        ),
        (
            {"data.curriculum_steps": "3"},
            "config.data.curriculum_steps=3 does not work without config.data.curriculum: they are "
            "batches that a column orders",
        ),
    ],
)
def test_what_is_said(overrides, sentence):
    with pytest.raises(ConfigError) as refused:
        load_config("grpo", overrides)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "overrides",
    [
        {"data.num_workers": "2", "warmup.steps": "3"},  # processes read the warm-up's records
        {"algorithm": "sft", "data.num_workers": "2"},
        {"algorithm": "sft", "rollout.filter_groups.enable": "true", "rollout.n": "1"},
        {"algorithm": "sft", "reward.functions": "[]", "reward.process_rewards": "true"},
        {"placement.rollout": "1", "max_staleness": "1", "rollout.filter_groups.enable": "true"},
        {"actor.lora.dropout": "0.1", "actor.lora.dora": "true"},  # without a rank
    ],
)
def test_what_is_no_conflict(overrides):
    assert not list(
        conflicts(apply_overrides(BASE, {"teacher": None, "models": "[]", **overrides}))
    )
