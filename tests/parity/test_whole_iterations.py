"""Whole iterations of GRPO equal the same algorithm written by hand in torch.

A run of ours says what was sampled and which weights each iteration left. The replay begins with
the first weights in transformers' own model and takes from our run only the sampled tokens; the
rewards, log-probs, advantages, losses, gradients and optimizer steps are its own, to the end.
"""

import copy
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpoint.huggingface import export
from jaxrl_llm.config import load_config
from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.plan.roles import params_of
from jaxrl_llm.tokenizer import CharTokenizer
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.trainer.training import Training

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

CONFIG = Path(__file__).parents[2] / "configs" / "grpo.py"
SEED, STEPS = 3, 3
PROMPTS, N, MINI_BATCHES = 8, 4, 2
SAMPLES, RESPONSE = PROMPTS * N, 8
LEARNING_RATE, BETAS, MAX_NORM = 2e-3, (0.9, 0.95), 1.0
# The dual clip is far lower than a run would have it, or no sample of so few would reach it.
KL_COEF, CLIP, DUAL_CLIP = 0.05, 0.2, 1.1
# Of the difference of a tensor, relative to how far the iteration moved it; 4e-5 was the largest
# seen over several seeds.
BOUND = 3e-4

# Nothing is learned before, so the model writes characters at random. Digits end a response, so
# that lengths differ, and with them the two means of the aggregation.
OVERRIDES = {
    "seed": SEED,
    "total_steps": STEPS,
    "save_every": 0,
    "warmup": "null",
    "data.train_batch_size": PROMPTS,
    "data.max_response_length": RESPONSE,
    "rollout.n": N,
    "rollout.stop_token_ids": CharTokenizer().encode("0123456789"),
    "actor.hf_config.hidden_size": 32,
    "actor.hf_config.intermediate_size": 64,
    "actor.hf_config.num_hidden_layers": 2,
    "actor.hf_config.num_key_value_heads": 2,
    "actor.hf_config.initializer_range": 0.2,
    "actor.dtype": "float32",
    "actor.shuffle": "true",
    "actor.ppo_mini_batch_size": PROMPTS // MINI_BATCHES,
    "actor.optimizer.learning_rate": LEARNING_RATE,
    "actor.optimizer.schedule": "constant",
    "actor.optimizer.warmup_steps": 0,
    "actor.optimizer.weight_decay": 0.0,
    "algorithm.loss_aggregation": "seq-mean-token-mean",
    "algorithm.kl_loss_type": "k3_unclamped",
    "algorithm.kl_loss_coef": KL_COEF,
    "algorithm.clip_c": DUAL_CLIP,
    "validation.before_train": "false",
    "validation.every": 0,
    "log.tensorboard": "false",
}
REWARD = """
def letters(completions):
    return [sum(c.isalpha() for c in text) / 8 for text in completions]
"""


@dataclass
class Recording:
    """What our run leaves for the replay, in numpy."""

    directory: Path  # the first weights, as transformers reads them
    weights: list[dict[str, np.ndarray]] = field(default_factory=list)  # first, then each step's
    batches: list = field(default_factory=list)


def named_weights(run: Training) -> dict[str, np.ndarray]:
    """Copies of the actor's weights, by transformers' names and in its layout."""
    spec, params = run.plan.learner.spec, params_of(run.states["actor"])
    flat = {
        tuple(str(entry.key) for entry in path): np.array(value)
        for path, value in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    return {t.name: t.to_hf(flat[path]) for path, t in hf_names(spec.config, spec.kind).items()}


def record(patch: pytest.MonkeyPatch, directory: Path) -> Recording:
    """Have the next run write what it does into the recording."""
    recording, begin_step, measure = Recording(directory), Training.begin_step, Training.measure

    def begin_and_record(self):
        if not recording.weights:
            recording.weights.append(named_weights(self))
            params = params_of(self.states["actor"])
            export(directory, self.plan.learner.spec, params, tokenizer_files_from=CharTokenizer())
        return begin_step(self)

    def measure_and_record(self, batch, context, found):
        recording.batches.append(fetch(batch))
        recording.weights.append(named_weights(self))
        return measure(self, batch, context, found)

    patch.setattr(Training, "begin_step", begin_and_record)
    patch.setattr(Training, "measure", measure_and_record)
    return recording


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Recording:
    folder = tmp_path_factory.mktemp("whole_iterations")
    (folder / "reward.py").write_text(REWARD)
    overrides = OVERRIDES | {"reward.functions.0": f"{folder}/reward.py:letters"}
    overrides["run_dir"] = folder / "run"
    config = load_config(str(CONFIG), [(key, str(value)) for key, value in overrides.items()])
    with pytest.MonkeyPatch.context() as patch:
        found = record(patch, folder / "first")
        train(config)
    return found


@dataclass
class Samples:
    """The samples of an iteration in torch, each in a row of prompt, response and padding."""

    tokens: Any
    columns: Any  # [B, R] where the logits of a response's tokens stand
    mask: Any

    def __getitem__(self, rows) -> "Samples":
        return Samples(self.tokens[rows], self.columns[rows], self.mask[rows])


def samples_of(batch) -> Samples:
    lengths = batch.prompt_lengths
    tokens = np.zeros((SAMPLES, batch.prompts.shape[1] + RESPONSE), np.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = batch.prompts[row, :length]
        tokens[row, length : length + RESPONSE] = batch.responses[row]
    columns = lengths[:, None] - 1 + np.arange(RESPONSE)
    return Samples(*(torch.from_numpy(x.copy()) for x in (tokens, columns, batch.mask)))


def logprobs_of(model, samples: Samples):
    """Log-prob [B, R] of each token of a response; padding on the right needs no mask."""
    logprobs = torch.log_softmax(model(samples.tokens).logits[:, :-1], dim=-1)
    chosen = logprobs.gather(-1, samples.tokens[:, 1:, None])[..., 0]
    return chosen.gather(1, samples.columns) * samples.mask


def rewards_of(tokenizer, batch):
    """The share of letters, from transformers' decoding of the sampled tokens."""
    rows = zip(batch.responses, batch.mask.astype(bool), strict=True)
    texts = [tokenizer.decode(row[mask].tolist(), skip_special_tokens=True) for row, mask in rows]
    return torch.tensor([sum(c.isalpha() for c in text) / RESPONSE for text in texts])


def advantages_of(rewards):
    """[B, 1], each reward against its group's; torch's deviation is the unbiased one."""
    groups = rewards.reshape(PROMPTS, N)
    mean, std = groups.mean(dim=1, keepdim=True), groups.std(dim=1, keepdim=True)
    return ((groups - mean) / (std + 1e-6)).reshape(SAMPLES, 1)


def sample_order(step: int, shuffle: bool) -> np.ndarray:
    """The order in which the mini-batches take the samples: a draw of jax, as it is no formula."""
    if not shuffle:
        return np.arange(SAMPLES)
    key = jax.random.fold_in(jax.random.key(SEED), step)
    return np.array(jax.random.permutation(jax.random.split(key, 1)[0], SAMPLES))


class Replay:
    """GRPO by hand, on from the first weights. The settings leave out a part of it."""

    def __init__(
        self,
        directory: Path,
        *,
        kl_coef=KL_COEF,
        clip=CLIP,
        dual_clip=DUAL_CLIP,
        max_norm=MAX_NORM,
        shuffle=True,
    ):
        self.kl_coef, self.clip, self.dual_clip = kl_coef, clip, dual_clip
        self.max_norm, self.shuffle = max_norm, shuffle
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        )
        # A random model samples padding like any other token, and torch would give its row no
        # gradient as an input.
        self.model.get_input_embeddings().padding_idx = None
        self.reference = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=1e-8, weight_decay=0.0
        )

    def iterate(self, step: int, batch):
        """One iteration on our samples; their rewards and log-probs before it."""
        samples, rewards = samples_of(batch), rewards_of(self.tokenizer, batch)
        with torch.no_grad():
            old = logprobs_of(self.model, samples)
            reference = logprobs_of(self.reference, samples)
        advantages = advantages_of(rewards)
        for rows in np.split(sample_order(step, self.shuffle), MINI_BATCHES):
            given = (samples[rows], old[rows], reference[rows], advantages[rows])
            self.optimizer.zero_grad()
            self.loss(*given).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
        return rewards, old

    def loss(self, samples: Samples, old, reference, advantages):
        """The clipped surrogate and k3, averaged over the tokens of a sample, then the samples."""
        logprobs = logprobs_of(self.model, samples)
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        policy = torch.maximum(-advantages * ratio, -advantages * clipped)
        bounded = torch.minimum(policy, -advantages * self.dual_clip)
        policy = torch.where(advantages < 0, bounded, policy)
        d = reference - logprobs
        per_token = policy + self.kl_coef * (torch.exp(d) - d - 1)
        return ((per_token * samples.mask).sum(dim=1) / samples.mask.sum(dim=1)).mean()

    def misses(self, before: dict, after: dict) -> dict[str, float]:
        """Of each tensor, |theirs - ours| over |our movement|.

        Norms of whole tensors: where a gradient is almost 0, Adam's first steps are of its sign
        alone, and single entries may differ by a whole step.
        """
        state = {name: value.numpy() for name, value in self.model.state_dict().items()}
        return {
            name: float(np.linalg.norm(state[name] - ours) / np.linalg.norm(ours - before[name]))
            for name, ours in after.items()
        }


def test_the_run_has_something_to_compare(recording):
    """Rewards and lengths vary, and every tensor moves in every iteration."""
    assert len(recording.batches) == STEPS
    weights = pairwise(recording.weights)
    for batch, (before, after) in zip(recording.batches, weights, strict=True):
        assert (batch.scores.reshape(PROMPTS, N).std(axis=1) > 0).sum() > PROMPTS / 2
        assert len(set(batch.mask.sum(axis=1))) > 3
        assert all(np.linalg.norm(after[n] - before[n]) > LEARNING_RATE for n in after)


def test_iterations_equal_those_by_hand(recording):
    replay = Replay(recording.directory)
    for i, batch in enumerate(recording.batches):
        rewards, old = replay.iterate(i + 1, batch)
        np.testing.assert_array_equal(rewards, batch.scores)
        for ours in (batch.old_logprobs, batch.rollout_logprobs):
            np.testing.assert_allclose(ours * batch.mask, old, atol=1e-4)
        misses = replay.misses(recording.weights[i], recording.weights[i + 1])
        assert max(misses.values()) < BOUND, misses


@pytest.mark.parametrize(
    "part",
    [
        {"kl_coef": 0.0},
        {"clip": math.inf},
        {"dual_clip": math.inf},
        {"max_norm": math.inf},
        {"shuffle": False},
    ],
    ids=lambda part: next(iter(part)),
)
def test_without_a_part_they_differ(recording, part):
    """So the comparison sees each of these parts."""
    replay = Replay(recording.directory, **part)
    for i, batch in enumerate(recording.batches):
        replay.iterate(i + 1, batch)
    misses = replay.misses(recording.weights[-2], recording.weights[-1])
    assert min(misses.values()) > 10 * BOUND, misses
