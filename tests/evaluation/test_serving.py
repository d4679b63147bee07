"""The cache of an engine that serves."""

import pytest
from tiny import DEEPSEEK, MODEL

from jaxrl_llm.evaluation.serving import CPU_BYTES, _room
from jaxrl_llm.models.families import config_from_hf


@pytest.mark.parametrize(("model", "parts"), [({}, 2), (DEEPSEEK, 1)])
def test_devices_that_share_heads_have_room_for_more_tokens(model, parts):
    """Two KV heads are two parts on four devices. Each device has a whole latent cache."""
    config = config_from_hf(MODEL | model)
    heads, size = config.cache_heads
    numbers = config.num_layers * heads * size * 2  # a key and a value
    one, four = (_room(config, 4, 8, 0, tensor) for tensor in (1, 4))
    assert one == CPU_BYTES // (4 * numbers)
    assert four == pytest.approx(parts * one, abs=parts)
