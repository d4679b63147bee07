"""Models that see, on a mesh of several devices and on one: the same step."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from PIL import Image
from tiny_iteration import OF_THE_DECODE_LOOP, even_tokens, first_states, packed, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.config import Config, MeshConfig
from jaxrl_llm.configs.grpo_vision import MODEL as SMOLVLM
from jaxrl_llm.data.collating import prompt_batch
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.images import images_of
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.types import Prompt, RolloutBatch

pytestmark = pytest.mark.slow

PROMPTS, N = 8, 2
TEXT = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
VISION |= {"out_hidden_size": 32, "patch_size": 2}
MODELS = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 100,
        "text_config": TEXT | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision_config": VISION | {"window_size": 8, "fullatt_block_indexes": [1]},
    },
    "smolvlm": SMOLVLM
    | {
        "text_config": SMOLVLM["text_config"] | TEXT,
        "vision_config": SMOLVLM["vision_config"] | {"image_size": 8, "patch_size": 2},
    },
}


def config_of(model: str, train: str) -> Config:
    base = tiny_config(model_reward=False)
    vision = c.VisionConfig(train=train)
    return replace(
        base,
        data=replace(
            base.data,
            train_batch_size=PROMPTS,
            max_images=2,
            max_image_tokens=9,
            max_prompt_length=24,
        ),
        actor=replace(base.actor, hf_config=MODELS[model], vision=vision, ppo_epochs=1),
        algorithm=c.GRPO(),
    )


def batch_of(config: Config, tokenizer) -> RolloutBatch:
    """Prompts with two images, none and one, of several sizes."""
    rng = np.random.default_rng(0)
    seen, prompts = images_of(tokenizer), {}
    for number in range(PROMPTS):
        sizes = [((8, 8), (12, 9)), (), ((10, 4),)][number % 3]
        images = tuple(Image.fromarray(rng.integers(0, 256, (*s, 3), np.uint8)) for s in sizes)
        ids = [9, *[seen.token_id, 11] * len(images), 12 + number]
        ids = seen.expanded(ids, iter(seen.grids(images)))
        prompts[number] = Prompt(token_ids=tuple(ids), text="", images=images)
    rows = np.arange(PROMPTS * N)
    length = config.data.max_prompt_length
    return prompt_batch(prompts, rows, n=N, max_prompt_length=length, pad_id=0, images=seen)


def step(config: Config, mesh):
    tokenizer = load_tokenizer("char")
    (phase,) = plan_online(config, tokenizer, mesh, ArrayReward(even_tokens)).phases
    batch = make_global(batch_of(config, tokenizer), batch_sharding(phase.mesh))
    states, batch, metrics = phase.program.run(first_states(phase), batch, 1, None, Timer())
    return fetch(states["actor"]), fetch(batch), fetch(metrics)


@pytest.mark.parametrize(
    ("model", "train", "tokens"),
    [("qwen2_5_vl", "all", 40), ("smolvlm", "projector", 0)],
)
def test_a_step_is_the_same_on_four_replicas(model, train, tokens):
    config = config_of(model, train)
    config = packed(config, tokens) if tokens else config
    state, batch, metrics = step(config, make_mesh(devices=jax.devices()[:1]))
    config = replace(config, mesh=MeshConfig(data=2, fsdp=2))
    spread_state, spread, found = step(config, make_mesh(2, 2, 1, devices=jax.devices()[:4]))
    assert batch.image_places.max() > 0 and metrics["actor/grad_norm"] > 0
    np.testing.assert_array_equal(spread.responses, batch.responses)
    for key in metrics.keys() - OF_THE_DECODE_LOOP - {"actor/micro_batches", "actor/row_use"}:
        np.testing.assert_allclose(found[key], metrics[key], rtol=1e-3, atol=1e-4, err_msg=key)
    for own, other in zip(jax.tree.leaves(state), jax.tree.leaves(spread_state), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-4)
