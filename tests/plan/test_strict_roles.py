"""How strict roles compute on each kind of device."""

import jax
import pytest
from tiny_models import CONFIGS

from jaxrl_llm.kernels import flash_attention
from jaxrl_llm.kernels.strict import Strict
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.shapes import SHAPES
from jaxrl_llm.plan.roles import strict_of


@pytest.fixture
def hopper(monkeypatch):
    """A process that takes its devices for H200s."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(flash_attention, "on_hopper", lambda: True)


def test_a_gpu_takes_our_kernels_and_the_blocks_of_decoding(hopper):
    spec = model_spec(SHAPES["qwen2.5-1.5b"])
    for attention in ("auto", "pallas", "exact"):
        found = strict_of(spec, "bfloat16", attention)
        assert found == Strict(rows=256, block=64, align=64, kernels=True)
    small = strict_of(model_spec(SHAPES["qwen2.5-0.5b"]), "bfloat16", "auto")
    assert small.block == small.align == 128


@pytest.mark.parametrize(
    ("shape", "dtype", "attention"),
    [
        ("qwen2.5-1.5b", "float32", "auto"),
        ("qwen2.5-1.5b", "bfloat16", "xla"),
        ("tiny", "bfloat16", "auto"),
    ],
)
def test_what_our_kernels_do_not_take_is_refused(hopper, shape, dtype, attention):
    with pytest.raises(ValueError, match="exact=strict: xla attention .*exact=repeatable works"):
        strict_of(model_spec(SHAPES[shape]), dtype, attention)


def test_families_whose_bits_were_not_compared_are_refused(monkeypatch):
    for family in ("olmo2", "granite", "glm4"):
        assert not strict_of(model_spec(CONFIGS[family]), "float32", "auto").kernels
    with pytest.raises(ValueError, match="exact=strict: .* gemma model with unit_offset, activ"):
        strict_of(model_spec(CONFIGS["gemma"]), "float32", "auto")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="exact=strict: .* olmo2 model with norms, qk_norm_whole"):
        strict_of(model_spec(CONFIGS["olmo2"]), "bfloat16", "auto")
