"""The records that cross a boundary between rooms.

Shape letters: B samples, P prompt tokens (padded), R response tokens (padded), T tokens of a whole
row (padded). Every row is padded on the right, so positions are 0, 1, 2, ... with no offset.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import jax
from jaxtyping import Array, Float, Int, UInt8, UInt32


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt on the host, tokenised, with every other column of its row."""

    token_ids: tuple[int, ...]
    text: str  # text after the chat template, as the trace shows it
    messages: tuple[dict[str, Any], ...] | None = None  # None for a prompt that is a plain string
    data_source: str = "default"
    ground_truth: Any = None
    columns: dict[str, Any] = field(default_factory=dict)  # the row's others, for reward functions
    row: int = 0  # position in its source, 0-based
    images: tuple[Any, ...] = ()  # as the row has them: see images.py

    @property
    def answer(self) -> Any:
        """The data source and the right answer, which grade it."""
        return self.data_source, self.ground_truth


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response on the host; `tokens` includes the stop token when the model produced one."""

    tokens: tuple[int, ...]
    text: str  # without special tokens
    logprobs: tuple[float, ...]
    finished: bool  # False when the response was cut at the maximum length


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Samples of one iteration. Sample i answers prompt i // n: group order never changes.

    The fields after `group_ids` start as None; a stage of the dataflow writes each.
    A stage and a loss name the fields that they read, so these names are the vocabulary of
    `algorithms/`.
    """

    prompts: Int[Array, "B P"]
    prompt_lengths: Int[Array, " B"]
    sample_ids: UInt32[Array, " B"]  # counter in its step: the key of its draws
    group_ids: Int[Array, " B"]  # number of the prompt; equal for samples that answer the same
    # Of a model with an image encoder: images, their tokens, patches of a token, values of a patch;
    # and the feature of each prompt token: image times N plus token of the image, -1 for text.
    images: UInt8[Array, "B I N C Q"] | None = None
    image_places: Int[Array, "B P"] | None = None
    # Where images have several sizes: rows and columns of their tokens; and what the positions of
    # the prompt's tokens for rope on three axes differ from their numbers. Tokens behind the prompt
    # have the last of these.
    image_grids: Int[Array, "B I 2"] | None = None
    image_offsets: Int[Array, "B P 3"] | None = None

    responses: Int[Array, "B R"] | None = None  # sampled and observed tokens
    response_lengths: Int[Array, " B"] | None = None  # number of these tokens
    mask: Float[Array, "B R"] | None = None  # 1 for a sampled token, the stop token included
    rollout_logprobs: Float[Array, "B R"] | None = None  # from the sampler
    # The experts that the sampler chose for each token, -1 for no token: routing replay.
    rollout_routes: Int[Array, "B T L K"] | None = None
    # The tokens that the sampler's filters kept at each place, -1 for no token. Log-probs, entropy
    # and KL are over these tokens.
    rollout_kept: Int[Array, "B R K"] | None = None
    # On a sampled token, the number of its turn in the response, from 0 on; -1 elsewhere.
    turn_ids: Int[Array, "B R"] | None = None
    # With rollout.max_rows above 1: the column of the response at which the row of a token begins;
    # -1 in the first row of a sample, which begins with its prompt. A token sees its row alone.
    row_starts: Int[Array, "B R"] | None = None
    # On the sampled tokens of a turn, an int32 hash of the state in which the turn begins.
    state_keys: Int[Array, "B R"] | None = None
    # With partial rollouts: updates of the policy that sampled each token; -1 outside of the mask.
    policy_versions: Int[Array, "B R"] | None = None
    old_logprobs: Float[Array, "B R"] | None = None  # from the trainer before the update
    # Sum over the vocabulary of the squared probabilities of the policy of `old_logprobs`.
    sum_pi_squared: Float[Array, "B R"] | None = None
    reference_logprobs: Float[Array, "B R"] | None = None
    teacher_logprobs: Float[Array, "B R"] | None = None
    # The tokens that the teacher finds likeliest at each position, best first.
    teacher_top_ids: Int[Array, "B R K"] | None = None
    teacher_top_logprobs: Float[Array, "B R K"] | None = None
    values: Float[Array, "B R"] | None = None
    scores: Float[Array, " B"] | None = None  # one float32 reward a sample, before any KL term
    # The two parts of a score that reward functions and a reward model give together.
    function_scores: Float[Array, " B"] | None = None
    model_scores: Float[Array, " B"] | None = None
    # What the reward functions said, one column each and unweighted; NaN where one said None.
    reward_parts: Float[Array, "B K"] | None = None
    # 1 for a sample that the host leaves out: its reward failed or, by choice, it was truncated.
    left_out: Float[Array, " B"] | None = None
    sample_mask: Float[Array, " B"] | None = None  # 1 for a sample that is learned from
    # The part of the scores that reward functions gave to steps, at the last token of each.
    step_rewards: Float[Array, "B R"] | None = None
    rewards: Float[Array, "B R"] | None = None  # per token: the score at the last token, less KL
    advantages: Float[Array, "B R"] | None = None
    returns: Float[Array, "B R"] | None = None
    importance_weights: Float[Array, "B R"] | None = None  # rollout correction, truncated
    loss_mask: Float[Array, "B R"] | None = None  # the mask less what a rejection rule leaves out
    # The most likely answer to each prompt, on the first sample of its group; the others' are
    # empty. Its score stands on every sample of the group.
    greedy_responses: Int[Array, "B R"] | None = None
    greedy_lengths: Int[Array, " B"] | None = None
    greedy_logprobs: Float[Array, "B R"] | None = None
    greedy_scores: Float[Array, " B"] | None = None
    greedy_function_scores: Float[Array, " B"] | None = None
    greedy_model_scores: Float[Array, " B"] | None = None
    # Fields that stages of the user's add, by name; the leading axis of each is B.
    extra: dict[str, Array] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """A field by its name, also one of `extra`. KeyError for an unknown name."""
        return getattr(self, name) if name in ROLLOUT_FIELDS else self.extra[name]

    def replace(self, **changes: Any) -> "RolloutBatch":
        """A copy with some fields changed; other names go to `extra`."""
        known = {name: x for name, x in changes.items() if name in (*ROLLOUT_FIELDS, "extra")}
        added = {name: x for name, x in changes.items() if name not in known}
        if added:
            known["extra"] = known.get("extra", self.extra) | added
        return replace(self, **known)


IMAGE_FIELDS = ("images", "image_places", "image_grids", "image_offsets")
ROLLOUT_FIELDS = tuple(f.name for f in fields(RolloutBatch) if f.name != "extra")
# The shape letters of each field that a stage writes.
ROLLOUT_AXES = {
    f.name: tuple(get_args(f.type)[0].dim_str.split())
    for f in fields(RolloutBatch)
    if f.name in ROLLOUT_FIELDS and f.default is None and f.name not in IMAGE_FIELDS
}
INPUT_FIELDS = ("prompts", "prompt_lengths", "sample_ids", "group_ids", *IMAGE_FIELDS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows for supervised training: the loss falls on tokens whose loss_mask is 1."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    loss_mask: Float[Array, "B T"]  # 1 where the token is to be predicted; position 0 is always 0
    images: UInt8[Array, "B I N C Q"] | None = None  # as in `RolloutBatch`
    image_places: Int[Array, "B T"] | None = None
    image_grids: Int[Array, "B I 2"] | None = None
    image_offsets: Int[Array, "B T 3"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OfflineBatch:
    """Records of one step of offline training; which fields are there depends on their kind.

    A record is a row, a pair of rows or a row with a number (`algorithms/offline.py` lists the
    kinds). The fields from `reference_...` on start as None; a stage of the dataflow writes each.
    """

    index: Int[Array, " B"]  # number of the record in its data set
    weights: Float[Array, " B"]  # 1; 0 for a record that only fills the batch
    completion: TokenBatch | None = None
    chosen: TokenBatch | None = None
    rejected: TokenBatch | None = None
    mismatched: TokenBatch | None = None  # the prompt with the completion of the record before it
    margins: Float[Array, " B"] | None = None  # margin of a preference; 0 without one
    labels: Float[Array, " B"] | None = None  # 1 for a desirable completion, 0 for another
    ratings: Float[Array, " B"] | None = None

    # Log-prob of each completion under the reference model, summed over its tokens.
    reference_completion_logprobs: Float[Array, " B"] | None = None
    reference_chosen_logprobs: Float[Array, " B"] | None = None
    reference_rejected_logprobs: Float[Array, " B"] | None = None
    reference_mismatched_logprobs: Float[Array, " B"] | None = None
    baseline: Float[Array, " B"] | None = None  # the algorithm's, from the whole batch

    def __getitem__(self, name: str) -> Any:
        """A field by its name. KeyError for an unknown name."""
        if name not in OFFLINE_FIELDS:
            raise KeyError(name)
        return getattr(self, name)

    def replace(self, **changes: Any) -> "OfflineBatch":
        """A copy with some fields changed."""
        return replace(self, **changes)


ROW_GROUPS = ("completion", "chosen", "rejected", "mismatched")
OFFLINE_FIELDS = tuple(f.name for f in fields(OfflineBatch))
OFFLINE_INPUTS = OFFLINE_FIELDS[: OFFLINE_FIELDS.index("reference_completion_logprobs")]


Batch = RolloutBatch | OfflineBatch  # what a step computes on
