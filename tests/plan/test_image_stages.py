"""Every model of a run sees the images: a step's numbers, and the same sample by sample."""

import io
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image
from tiny_images import MODELS, by_sample, image_config, image_step, one_sample
from tiny_iteration import first_states, packed

from jaxrl_llm import config as c
from jaxrl_llm.data.collating import collate_records
from jaxrl_llm.data.dataset import Sources
from jaxrl_llm.data.run_data import load_records
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.images import images_of
from jaxrl_llm.learner.forward import (
    ForwardSettings,
    response_logprobs,
    response_token_scores,
    response_values,
)
from jaxrl_llm.models.base import merge_adapters
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

PLAIN = ForwardSettings()


def token_id(role: Role) -> int:
    assert role.spec.config.vision is not None
    return role.spec.config.vision.image_token_id


@pytest.mark.parametrize(("model", "tokens"), [("qwen2_5_vl", 40), ("smolvlm", 0)])
def test_critic_and_reward_model_see_images(model, tokens):
    config = image_config(model, "all", c.PPO(), reward=c.RewardConfig(model=c.RewardModelConfig()))
    config = packed(config, tokens) if tokens else config
    phase, first, after, batch, metrics = image_step(config)
    critic, reward = phase.roles["critic"], phase.roles["reward"]
    how = {"spec": critic.spec, "settings": PLAIN}
    weights = first["critic"].params
    values = by_sample(lambda rows: response_values(weights, rows, **how), batch, token_id(critic))
    assert np.abs(values).max() > 0.1
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(batch.values * mask, values * mask, atol=1e-5)
    how |= {"spec": reward.spec}
    scores = by_sample(
        lambda rows: response_token_scores(first["reward"], rows, **how), batch, token_id(reward)
    )
    last = scores[np.arange(len(scores)), batch.response_lengths - 1]
    np.testing.assert_allclose(batch.scores, last, atol=1e-5)

    # The critic's gradient: clipping does nothing in the first step, so the loss is a mean square.
    @jax.jit
    def of_sample(params, rows, returns, weights):
        new = response_values(params, rows, spec=critic.spec, settings=PLAIN)
        return 0.5 * (jnp.square(new - returns) * weights).sum()

    value, gradient = 0.0, jax.tree.map(jnp.zeros_like, weights)
    for row in range(len(mask)):
        rows, prompt, length = one_sample(batch, row, token_id(critic))
        at = slice(prompt, prompt + length)
        returns, of_response = (np.zeros(rows.tokens.shape, np.float32) for _ in range(2))
        returns[0, at], of_response[0, at] = batch.returns[row, :length], 1 / mask.sum()
        part, own = jax.value_and_grad(of_sample)(weights, rows, returns, of_response)
        value, gradient = value + part, jax.tree.map(jnp.add, gradient, own)
    np.testing.assert_allclose(metrics["critic/vf_loss"], value, rtol=1e-4)
    norm = float(optax.tree.norm(gradient))
    np.testing.assert_allclose(metrics["critic/grad_norm"], norm, rtol=1e-3)
    assert float(optax.tree.norm(gradient["vision"])) > 0.01 * norm
    moved = jax.tree.map(lambda a, b: (a != b).any(), weights, after["critic"].params)
    assert any(jax.tree.leaves(moved["vision"]))


def test_a_critic_of_adapters_sees_images():
    """Actor and critic share the frozen base, and with it the encoder."""
    config = image_config("qwen2_5_vl", "none", c.PPO())
    lora = c.LoraConfig(rank=2, alpha=4.0)
    actor, critic = (replace(x, lora=lora) for x in (config.actor, config.critic))
    config = packed(replace(config, actor=actor, critic=critic), 40)
    phase, first, _, batch, metrics = image_step(config)
    assert metrics["training/rollout_probs_diff_max"] < 1e-6
    role = phase.roles["critic"]
    spec, params = merge_adapters(role.spec, role.params_in(first), "float32")
    values = by_sample(
        lambda rows: response_values(params, rows, spec=spec, settings=PLAIN),
        batch,
        token_id(role),
    )
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(batch.values * mask, values * mask, atol=1e-5)


def test_teachers_and_greedy_answers_see_images():
    config = image_config("qwen2_5_vl", "none", c.Distillation())
    config = replace(config, teacher=c.TeacherConfig(hf_config=MODELS["qwen2_5_vl"]))
    phase, first, _, batch, metrics = image_step(config)
    teacher = phase.roles["teacher"]
    # The prompts have two images, none, one, two, and so on.
    tokens = (np.asarray(batch.prompts) == token_id(teacher)).sum()
    expected = {
        "per_row": 8 / 8,
        "tokens": tokens / 16,
        "token_share": tokens / batch.prompt_lengths.sum(),
        "room_use": tokens / (16 * 2 * 9),
        "pixels_gb": 16 * 2 * 9 * 4 * 3 * 2 * 2 / 1e9,
    }
    found = {name: metrics[f"images/{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-6)

    def logprobs(rows):
        return response_logprobs(first["teacher"], rows, spec=teacher.spec, settings=PLAIN)[0]

    simple = by_sample(logprobs, batch, token_id(teacher))
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(batch.teacher_logprobs * mask, simple * mask, atol=1e-5)


def test_a_model_of_text_cannot_join():
    config = image_config("qwen2_5_vl", "none", c.Distillation())
    config = replace(config, teacher=c.TeacherConfig(hf_config=MODELS["smolvlm"]))
    with pytest.raises(c.ConfigError, match="config.teacher: its images have other patches"):
        image_step(config)


def picture(value: int, size: tuple[int, int]) -> bytes:
    pixels = np.random.default_rng(value).integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_preferences_with_images():
    """DPO of pairs with two images, one and none, by sums of log-probs of rows by hand."""
    config = image_config("qwen2_5_vl", "all", c.DPO(), rollout=c.RolloutConfig())
    config = replace(config, reward=c.RewardConfig(), data=replace(config.data, train_batch_size=4))
    tokenizer, mesh = load_tokenizer("char"), make_mesh(devices=jax.devices()[:1])
    plan = plan_offline(config, tokenizer, mesh)
    marks = ["<image><image>", "<image>", "", "<image>"]
    rows = [
        {
            "prompt": f"a{mark}b",
            "chosen": "cd" * (1 + number % 2),
            "rejected": "e",
            "images": [picture(9 * number + i, (8, 4 + 4 * i)) for i in range(mark.count("<"))],
        }
        for number, mark in enumerate(marks)
    ]
    records = load_records(config, Sources(rows=rows), "preferences", tokenizer, None)
    batch = collate_records(
        records, length=config.data.max_row_length, pad_id=0, images=images_of(tokenizer)
    )
    phase = plan.at(1)
    states = first_states(phase)
    first = fetch(states)
    placed = make_global(batch, batch_sharding(mesh))
    _, _, metrics = phase.program.run(states, placed, 1, None, Timer())
    actor = phase.roles["actor"]

    def logprobs(params, rows):
        return response_logprobs(params, rows, spec=actor.spec, settings=PLAIN)[0]

    @jax.jit
    def loss(params):
        total = 0.0
        for number in range(len(rows)):
            gaps = []
            for group in (batch.chosen, batch.rejected):
                sample = SimpleNamespace(
                    prompts=group.tokens,
                    prompt_lengths=group.lengths,
                    responses=group.tokens[:, :0],
                    response_lengths=0 * group.lengths,
                    images=group.images,
                    image_grids=group.image_grids,
                )
                row, _, _ = one_sample(sample, number, token_id(actor))
                gap = logprobs(params, row) - logprobs(first["reference"], row)
                gaps.append((gap[0] * group.loss_mask[number]).sum())
            total += jnp.log1p(jnp.exp(-0.1 * (gaps[0] - gaps[1])))
        return total / len(rows)

    value, gradient = jax.value_and_grad(loss)(first["actor"].params)
    np.testing.assert_allclose(fetch(metrics)["loss"], value, rtol=1e-4)
    norm = fetch(metrics)["grad_norm"]
    np.testing.assert_allclose(norm, optax.tree.norm(gradient), rtol=1e-3)
    assert float(optax.tree.norm(gradient["vision"])) > 0.01 * norm
