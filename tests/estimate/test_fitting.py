"""The slots and the cache that fit: against every setting, real arrays, and the refused cases."""

import functools
import json
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import further
from tiny import EXPERTS, HYBRID, MODEL
from tiny_iteration import first_states, open_iteration, prompts, tiny_config
from tiny_program import EXACT, program_config

import jaxrl_llm as rl
from jaxrl_llm import config as c
from jaxrl_llm.distributed.hardware import MEMORY, USABLE
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.estimate import fitting
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import Estimate, estimate
from jaxrl_llm.estimate.memory import sampled_bytes, temporary
from jaxrl_llm.estimate.rates import rates_of
from jaxrl_llm.estimate.work import Work, work_of
from jaxrl_llm.generation.engine import GenerationLoops
from jaxrl_llm.generation.memory import (
    GB,
    Replica,
    cache_bytes,
    fitted,
    generation_bytes,
)
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.hopper import compiling_for_hopper
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import config_from_hf, to_hf_config
from jaxrl_llm.models.shapes import SHAPES, num_parameters
from jaxrl_llm.observability.timing import Timer

LLAMA_3B = replace(
    SHAPES["llama-3.1-8b"],
    hidden_size=3072,
    num_layers=28,
    sliding_window=(None,) * 28,
    num_heads=24,
    intermediate_size=8192,
)
QWEN3_14B = config_from_hf(
    {
        **{"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 5120, "head_dim": 128},
        **{"intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40},
        **{"num_key_value_heads": 8, "max_position_embeddings": 40_960},
        "tie_word_embeddings": False,
    }
)
ADAPTERS = c.LoraConfig(rank=16, alpha=32, merge=False)
FULL = c.LoraConfig()


def settings_of(longest: int, group: int = 1, **changes) -> GenerationSettings:
    sampling = SamplingParams(max_new_tokens=longest)
    return GenerationSettings(sampling=sampling, group=group, **changes)


def replica(model: ModelConfig, samples: int, **changes) -> Replica:
    given: dict[str, Any] = {"dtype": "bfloat16", "tensor": 1, "width": 512} | changes
    return Replica(config=model, samples=samples, **given)


def run(
    model: ModelConfig,
    groups: tuple[int, int],
    response: int,
    lora: c.LoraConfig = FULL,
    algorithm: c.AlgorithmSettings | None = None,
    **rollout,
) -> c.Config:
    """A run in bf16 with prompts of 512 tokens, on one device."""
    rows: dict[str, Any] = {
        "dtype": "bfloat16",
        "remat": "full",
        "micro_batch_tokens": 512 + response,
        "optimizer": c.OptimizerConfig(moment_dtype="bfloat16"),
    }
    return c.Config(
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(),),
            train_batch_size=groups[0],
            max_prompt_length=512,
            max_response_length=response,
        ),
        actor=c.ActorConfig(
            hf_config=to_hf_config(model), ppo_mini_batch_size=groups[0], lora=lora, **rows
        ),
        critic=c.CriticConfig(**rows),
        rollout=c.RolloutConfig(n=groups[1], **rollout),
        algorithm=algorithm or c.GRPO(use_kl_loss=False),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )


def one_device(work: Work, hardware: str) -> Devices:
    return Devices(mesh=work.config.mesh, hosts=1, rates=rates_of(hardware))


def planned(work: Work, hardware: str = "h200") -> Estimate:
    """The estimate on one device."""
    return estimate(work, one_device(work, hardware))


def fits_with(chosen: Estimate, slots: int, tokens: int) -> bool:
    """Whether the work of an estimate fits with these settings."""
    work, devices = chosen.work, chosen.devices
    assert work.settings is not None
    settings = replace(work.settings, num_slots=slots, cache_tokens=tokens)
    (job,) = (job for job in work.jobs if job.does == "generate")
    used = temporary(job, replace(work, settings=settings), devices)
    most = max(used, *(size for name, size in chosen.temporaries.items() if name != job.stage))
    return sum(chosen.kept.values()) + most <= devices.rates.capacity


# ------------------------------------------------------------------------- the refused cases


@pytest.mark.parametrize(
    ("model", "samples", "group", "longest", "needed_gib", "slots", "tokens"),
    [
        (LLAMA_3B, 768, 1, 6144, 555, 384, 770_000),
        (QWEN3_14B, 512, 4, 2048, 198, 512, 440_000),
    ],
)
def test_shapes_that_were_refused_on_one_h200_get_slots_and_a_cache(
    model, samples, group, longest, needed_gib, slots, tokens
):
    weights = 2.0 * num_parameters(model)
    free = rates_of("h200").filled - weights
    one = replica(model, samples)
    asked = settings_of(longest, group)
    with compiling_for_hopper():
        everything = generation_bytes(asked, one)
        found = fitted(asked, one, free)
        used = generation_bytes(found, one)
    assert (everything + weights) / 2**30 == pytest.approx(needed_gib, rel=0.06)
    assert (found.num_slots or samples, found.cache_tokens > tokens) == (slots, True)
    assert 0.99 * free < used <= free


# ------------------------------------------------------------------------- every setting

CASES = {
    "1.5B": run(SHAPES["qwen2.5-1.5b"], (128, 8), 2048),
    "1.5B with long responses": run(SHAPES["qwen2.5-1.5b"], (128, 8), 16_384),
    "4B with short responses": run(LLAMA_3B, (512, 8), 256),
    "7B": run(SHAPES["qwen2.5-7b"], (128, 8), 2048),
    "7B with long responses in float8": run(
        SHAPES["qwen2.5-7b"], (32, 8), 16_384, quantization="float8"
    ),
    "7B with adapters": run(SHAPES["qwen2.5-7b"], (128, 8), 16_384, ADAPTERS),
    "14B with adapters": run(SHAPES["qwen2.5-14b"], (128, 4), 2048, ADAPTERS),
    "32B with adapters": run(SHAPES["qwen2.5-32b"], (128, 8), 2048, ADAPTERS),
    "experts with adapters": run(SHAPES["qwen3-30b-a3b"], (32, 8), 2048, ADAPTERS),
    "PPO of four models": replace(
        run(
            SHAPES["qwen2.5-1.5b"],
            (512, 1),
            4096,
            algorithm=c.PPO(use_kl_in_reward=True),
        ),
        reward=c.RewardConfig(
            model=c.RewardModelConfig(
                hf_config=to_hf_config(SHAPES["qwen2.5-1.5b"]), dtype="bfloat16"
            )
        ),
    ),
}


@functools.cache
def work_in(name: str) -> Work:
    return work_of(CASES[name])


@pytest.mark.parametrize("hardware", further(["h200", "h100", "l40s"]))
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_refused_that_fits_with_some_setting(name, hardware):
    work = work_in(name)
    chosen = planned(work, hardware)
    count, longest = work.samples.count, work.samples.longest_response
    some = any(
        fits_with(chosen, slots, tokens)
        for slots in (1, 8, 64, count)
        for tokens in (longest, 4 * longest)
    )
    assert chosen.fits == some
    if not some:
        return
    # What is left of the card is for errors of the prediction, and for holes between arrays.
    card = MEMORY[hardware] * USABLE
    generating = sum(chosen.kept.values()) + chosen.temporaries["gen"]
    assert generating <= 0.95 * card or chosen.generating.settings.num_slots == 8
    settings = chosen.generating.settings
    assert settings is not None
    slots = settings.num_slots or count
    if settings.cache_tokens:
        layer = 2 * work.actor.config.num_kv_heads * work.actor.config.head_dim
        elements = settings.cache_tokens * layer
        assert elements < 2**31
        assert generating > 0.93 * card or elements > 0.999 * 2**31  # all of it is used
        assert settings.cache_tokens >= min(0.3 * slots, 1) * longest
    if 256 < slots < count:
        assert slots % 128 == 0


def test_the_largest_cases_are_no_trivial_ones():
    fits = {name: planned(work_in(name)) for name in CASES}
    assert all(each.fits for name, each in fits.items())
    slots = {
        name: each.generating.settings and each.generating.settings.num_slots
        for name, each in fits.items()
    }
    assert slots["1.5B"] == 0 and slots["32B with adapters"] == 192
    assert 128 <= slots["7B with adapters"] <= 512


# ------------------------------------------------------------------------- the choice


def test_a_cpu_and_memory_for_everything_change_nothing():
    model = config_from_hf(MODEL)
    asked = settings_of(64, 4)
    assert fitted(asked, replica(model, 32), 0.0) is asked
    assert fitted(asked, replica(model, 32), 1e12) == asked


def test_given_slots_and_tokens_are_kept():
    one, asked = replica(SHAPES["qwen2.5-7b"], 1024), settings_of(2048, 8)
    both = replace(asked, num_slots=1024, cache_tokens=400_000)
    assert fitted(both, one, 20e9) == both
    slots = fitted(replace(asked, num_slots=300), one, 40e9)
    assert slots.num_slots == 300 and 0 < slots.cache_tokens < 300 * 2048
    assert generation_bytes(slots, one) <= 40e9
    tokens = fitted(replace(asked, cache_tokens=300_000), one, 60e9)
    # 30 % of the longest for each of 384 slots, which 512 would not have.
    assert (tokens.num_slots, tokens.cache_tokens) == (384, 300_000)


def test_rows_without_a_prompt_take_no_slot():
    one, asked = replica(SHAPES["qwen2.5-7b"], 1024, live=128), settings_of(2048)
    found = fitted(asked, one, 100e9)
    assert (found.num_slots, found.cache_tokens) == (128, 0)


def test_too_little_memory_gives_the_smallest_setting():
    found = fitted(settings_of(2048, 8), replica(SHAPES["qwen2.5-7b"], 1024), 1.0)
    assert (found.num_slots, found.cache_tokens) == (8, 2048)


@pytest.mark.parametrize("memory", [2e6, 4e6, 8e6, 1e9])
@pytest.mark.parametrize("changes", [{}, EXPERTS, HYBRID, {"quantization": "float8"}], ids=str)
def test_planned_bytes_of_the_cache_are_its_arrays(changes, memory):
    """Keys, values and states in bfloat16, or in float8, of settings that were found."""
    float8 = changes.get("quantization")
    hf = MODEL | ({} if float8 else changes) | {"max_position_embeddings": 1024}
    model = config_from_hf(hf)
    asked = settings_of(256, 4, **({"quantization": float8} if float8 else {}))
    one = replica(model, 64, width=48)
    found = fitted(asked, one, memory)
    spec = model_spec(model, dtype="bfloat16")
    row = jnp.zeros((64,), jnp.int32)

    def begin(params):
        return GenerationLoops(
            model=lambda trained: (spec, trained),
            trained=params,
            prompts_NP=jnp.zeros((64, 48), jnp.int32),
            lengths_N=row,
            sample_ids_N=row,
            seed_key=jax.random.key(0),
            settings=found,
        ).begin()

    *_, cache = jax.eval_shape(begin, spec.params)
    real = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert cache_bytes(found, one) == pytest.approx(real)
    assert generation_bytes(found, one) <= memory or found.num_slots == 8


@pytest.mark.nightly
def test_responses_do_not_depend_on_the_memory():
    """Two slots and a cache for some responses, and greedy answers in two slots too."""
    outputs = []
    for memory_gb in (0.0, 2e-5):
        config = tiny_config(algorithm={}, model_reward=False)
        config = replace(config, algorithm=c.ReMax(), reward=config.reward)
        rollout = replace(config.rollout, num_slots=0, memory_gb=memory_gb)
        config = replace(config, rollout=rollout, fuse_stages=False)
        phase = open_iteration(config)
        gen, greedy = (
            next(s.how.settings for s in phase.stages if s.name == name)
            for name in ("gen", "gen_max")
        )
        if memory_gb:
            assert 0 < gen.num_slots < 32 and 0 < greedy.num_slots < 16
        program = phase.program
        batch = make_global(prompts(config), batch_sharding(phase.mesh))
        segments = [s for s in program.segments if s.name in ("gen", "gen_max")]
        _, batch, metrics = program.run(first_states(phase), batch, 1, None, Timer(), segments)
        outputs.append(fetch((batch.responses, batch.greedy_responses)))
    for there, here in zip(*outputs, strict=True):
        np.testing.assert_array_equal(there, here)


# ------------------------------------------------------------------------- a run


@pytest.fixture
def on_h200(monkeypatch):
    """A machine whose one device says that it is an H200."""
    monkeypatch.setattr(fitting, "memory_limit", lambda: 139_000_000_000)
    monkeypatch.setattr(fitting, "known_kind", lambda: "h200")


def test_a_run_on_a_gpu_gets_the_memory_that_its_models_leave(on_h200, tmp_path):
    config = replace(CASES["14B with adapters"], run_dir=str(tmp_path))
    found = fitting.with_memory(config)
    model = work_of(config).actor
    base = sampled_bytes(model, "bfloat16")
    assert found.rollout.memory_gb == pytest.approx((0.95 * 129.72e9 - base) / GB, rel=0.01)
    assert 0 < found.validation.memory_gb <= found.rollout.memory_gb
    assert replace(found, rollout=config.rollout, validation=config.validation) == config
    given = replace(config.rollout, num_slots=64, cache_tokens=100_000)
    given = replace(config, rollout=given)
    assert fitting.with_memory(given) is given
    asked = replace(config, rollout=replace(config.rollout, memory_gb=20.0))
    assert fitting.with_memory(asked).rollout.memory_gb == 20.0
    larger = replace(config, rollout=replace(config.rollout, memory_gb=150.0))  # of a B200
    assert fitting.with_memory(larger).rollout.memory_gb == found.rollout.memory_gb


def test_a_run_on_a_cpu_is_left_as_it_is(tmp_path):
    config = replace(CASES["7B"], run_dir=str(tmp_path))
    assert fitting.with_memory(config) is config


def test_a_run_that_goes_on_takes_the_memory_of_its_folder(on_h200, tmp_path):
    config = replace(CASES["14B with adapters"], run_dir=str(tmp_path))
    fresh = fitting.with_memory(config).rollout.memory_gb
    stored = replace(
        config,
        rollout=replace(config.rollout, memory_gb=50.0),
        validation=replace(config.validation, memory_gb=40.0),
    )
    (tmp_path / "config.json").write_text(c.to_json(stored))

    def goes_on(config: c.Config, devices: str) -> tuple[float, float]:
        (tmp_path / "about.json").write_text(json.dumps({"devices": devices}))
        found = fitting.with_memory(config)
        return found.rollout.memory_gb, found.validation.memory_gb

    kind = jax.local_devices()[0].device_kind
    assert goes_on(config, f"1 x {kind}") == (50.0, 40.0)
    assert goes_on(config, "1 x NVIDIA A100")[0] == fresh
    wider = replace(config, mesh=c.MeshConfig(data=2))
    assert goes_on(wider, f"1 x {kind}")[0] == pytest.approx(fresh)
    assert math.isfinite(fresh)


def test_the_plan_and_the_run_have_the_same_slots(on_h200, tmp_path):
    config = replace(CASES["14B with adapters"], run_dir=str(tmp_path))
    on_card = planned(work_of(config)).generating.settings
    with compiling_for_hopper():
        phase = open_iteration(fitting.with_memory(config))
    (stage,) = (stage for stage in phase.stages if stage.name == "gen")
    assert on_card is not None
    numbers = (stage.how.settings.num_slots, stage.how.settings.cache_tokens)
    assert numbers == (on_card.num_slots, on_card.cache_tokens)


def test_a_run_that_goes_on_with_other_moments_is_planned_again(on_h200, tmp_path):
    config = replace(CASES["1.5B"], run_dir=str(tmp_path))
    kind = jax.local_devices()[0].device_kind
    first = fitting.with_memory(config)
    (tmp_path / "config.json").write_text(c.to_json(first))
    (tmp_path / "about.json").write_text(json.dumps({"devices": f"1 x {kind}"}))
    optimizer = replace(config.actor.optimizer, offload=True)
    changed = replace(config, actor=replace(config.actor, optimizer=optimizer))
    found = fitting.with_memory(changed)
    moments = 4.0 * num_parameters(SHAPES["qwen2.5-1.5b"])  # two in bfloat16
    more = found.rollout.memory_gb - first.rollout.memory_gb
    assert more == pytest.approx(moments / GB, rel=0.02)


def test_a_rollout_apart_has_the_memory_of_its_own_devices(on_h200, tmp_path):
    config = replace(
        CASES["7B"],
        run_dir=str(tmp_path),
        mesh=c.MeshConfig(fsdp=4),
        placement={"rollout": "4-7"},
        max_staleness=1,
    )
    found = fitting.with_memory(config)
    weights = 2.0 * num_parameters(SHAPES["qwen2.5-7b"])
    own = (rates_of("h200").filled - weights) / GB
    assert found.rollout.memory_gb == pytest.approx(own, rel=0.01)
    # The actor's devices have a quarter of its state each, and the copy that answers.
    held_out = found.rollout.memory_gb - (4 + 2 * 2) * num_parameters(SHAPES["qwen2.5-7b"]) / 4 / GB
    assert found.validation.memory_gb == pytest.approx(held_out, rel=0.01)


@pytest.mark.nightly
def test_a_run_says_its_slots_and_goes_on_with_them(on_h200, monkeypatch, tmp_path, capsys):
    config = program_config(tmp_path / "run", total_steps=1, save_every=1, reward=EXACT)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    rl.train(config, train_data=rows)
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["rollout"]["memory_gb"]
    assert about["generation"].endswith(f"in {stored:g} GB")
    assert about["generation"] in capsys.readouterr().out
    # Another version, which would find other sizes, takes what the folder says.
    monkeypatch.setattr(fitting, "memory_limit", lambda: 70_000_000_000)
    rl.train(replace(config, total_steps=2), train_data=rows)
    after = json.loads((tmp_path / "run" / "config.json").read_text())["rollout"]["memory_gb"]
    assert after == stored > 100
