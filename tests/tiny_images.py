"""A step of tiny models that see, and the same numbers sample by sample."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from tiny_iteration import even_tokens, first_states, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.config import Config
from jaxrl_llm.configs.grpo_vision import MODEL as SMOLVLM
from jaxrl_llm.data.collating import prompt_batch
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.images import images_of
from jaxrl_llm.learner.rows import Rows, whole_rows
from jaxrl_llm.models.media import Media
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.types import Prompt, RolloutBatch

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


def image_config(model: str, train: str, algorithm: Any = None, **changes: Any) -> Config:
    """One optimizer step of one epoch; a function gives the reward."""
    base = tiny_config(model_reward=False)
    vision = c.VisionConfig(train=train)
    config = replace(
        base,
        data=replace(
            base.data,
            train_batch_size=PROMPTS,
            max_images=2,
            max_image_tokens=9,
            max_prompt_length=24,
        ),
        actor=replace(
            base.actor,
            hf_config=MODELS[model],
            vision=vision,
            ppo_epochs=1,
            ppo_mini_batch_size=PROMPTS,
        ),
        critic=replace(base.critic, ppo_epochs=1),
        algorithm=algorithm or c.GRPO(),
    )
    return replace(config, **changes)


def image_batch(config: Config, tokenizer: Any) -> RolloutBatch:
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


def image_step(config: Config, mesh: Any = None, role_meshes: Any = None) -> tuple[Any, ...]:
    """The phase, its first states, the new states, the whole batch and the metrics."""
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    tokenizer = load_tokenizer("char")
    reward = None if config.reward.model is not None else ArrayReward(even_tokens)
    (phase,) = plan_online(config, tokenizer, mesh, reward, role_meshes=role_meshes).phases
    batch = make_global(image_batch(config, tokenizer), batch_sharding(phase.mesh))
    first = fetch(states := first_states(phase))
    states, batch, metrics = phase.program.run(states, batch, 1, None, Timer())
    return phase, first, fetch(states), fetch(batch), fetch(metrics)


def one_sample(batch: RolloutBatch, row: int, token_id: int) -> tuple[Rows, int, int]:
    """A sample as a row of its own, with its images by hand; where its response is."""
    prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
    width = batch.prompts.shape[1] + batch.responses.shape[1]
    tokens = np.zeros(width, np.int32)
    tokens[:prompt] = batch.prompts[row, :prompt]
    tokens[prompt : prompt + response] = batch.responses[row, :response]
    num_images, most = batch.images.shape[1:3]
    place, at = np.full((1, width), -1, np.int32), 0
    rope, grids = np.zeros((1, width, 3), np.int32), None
    numbers = np.full((1, num_images, 2), -1, np.int32)
    next_position, image = 0, -1
    while at < width:
        if at >= prompt or tokens[at] != token_id:
            rope[0, at], next_position, at = next_position, next_position + 1, at + 1
            continue
        image += 1
        numbers[0, image] = 0, image
        if batch.image_grids is None:
            h = w = int(most**0.5)
        else:
            h, w = (int(x) for x in batch.image_grids[row, image])
        for token in range(h * w):
            place[0, at + token] = image * most + token
            rope[0, at + token] = np.array([0, token // w, token % w]) + next_position
        next_position, at = next_position + max(h, w), at + h * w
    if batch.image_grids is not None:
        grids = jnp.asarray(batch.image_grids[row][None])
    media = Media(
        jnp.asarray(batch.images[row][None]),
        jnp.asarray(numbers),
        jnp.asarray(place),
        grids_BC2=grids,
        rope_BT3=None if grids is None else jnp.asarray(rope),
    )
    return replace(whole_rows(jnp.asarray(tokens)[None]), media=media), prompt, response


def by_sample(run: Any, batch: RolloutBatch, token_id: int) -> np.ndarray:
    """`run` of each sample's row, a value a token [1, T], at the response tokens [B, R]."""
    out = np.zeros(batch.responses.shape, np.float32)
    run = jax.jit(run)
    for row in range(len(out)):
        rows, prompt, response = one_sample(batch, row, token_id)
        out[row, :response] = np.asarray(run(rows))[0, prompt : prompt + response]
    return out
