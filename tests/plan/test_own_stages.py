"""A user's stage, field and model from a file outside of the package: docs/add-a-stage.md."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_online_algorithms import config_of
from tiny_iteration import (
    MODEL,
    PROMPTS,
    N,
    even_tokens,
    first_states,
    in_micro_batches,
    open_iteration,
    packed,
    run_step,
)

from jaxrl_llm.config import (
    Config,
    ConfigError,
    Custom,
    ExtraModelConfig,
    OptimizerConfig,
    OwnUpdate,
    TeacherConfig,
    load_config,
)
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.memory import kept
from jaxrl_llm.estimate.rates import rates_of
from jaxrl_llm.estimate.search import best_layouts
from jaxrl_llm.estimate.work import work_of
from jaxrl_llm.learner.forward import response_logprobs, response_scores
from jaxrl_llm.learner.rows import rows_of, sample_fields
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.states import untrained_states

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "cost_model.py"
COST = ExtraModelConfig(name="cost", hf_config=MODEL)


def with_stage(path: str, *models: ExtraModelConfig, **settings):
    config = config_of("grpo", use_kl_loss=False)
    stage = Custom(path=path, settings=settings)
    return replace(config, models=models, stages=(stage,))


def test_the_score_of_a_second_model_is_taken_off_the_reward():
    config = with_stage(f"{EXAMPLE}:cost_penalty", COST, weight=0.25, limit=-0.5)
    iteration = open_iteration(config)
    names = [stage.name for stage in iteration.stages]
    assert {"cost", "reward", "cost_penalty"} <= set(names) and "cost" in iteration.roles
    assert iteration.roles["cost"].spec.kind == "scalar"
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    cost = np.asarray(batch["cost_scores"])
    assert cost.std() > 0
    excess = np.maximum(cost + 0.5, 0)
    np.testing.assert_allclose(batch["excess_cost"], excess, rtol=1e-6)
    even = even_tokens(np.asarray(batch.responses), np.asarray(batch.response_lengths))
    np.testing.assert_allclose(batch.function_scores, even, rtol=1e-6)
    np.testing.assert_allclose(batch.scores, even - 0.25 * excess, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["cost/excess"], excess.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rewards/cost/mean"], cost.mean(), rtol=1e-4, atol=1e-6)


def weighted(name: str, weight: float) -> ExtraModelConfig:
    return ExtraModelConfig(name=name, hf_config=MODEL, weight=weight)


@pytest.mark.nightly
def test_scores_of_several_models_are_weighted_parts_of_the_reward():
    models = (weighted("helpful", 0.5), weighted("safe", -2.0))
    iteration = open_iteration(replace(config_of("grpo", use_kl_loss=False), models=models))
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    helpful, safe = (np.asarray(batch[f"{name}_scores"]) for name in ("helpful", "safe"))
    assert helpful.std() > 0 and abs(helpful - safe).max() > 0
    even = even_tokens(np.asarray(batch.responses), np.asarray(batch.response_lengths))
    np.testing.assert_allclose(batch.scores, even + 0.5 * helpful - 2 * safe, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["rewards/safe/mean"], safe.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_greedy_answers_get_the_same_sum():
    config = replace(config_of("remax"), models=(weighted("helpful", 0.5),))
    iteration = open_iteration(config)
    _, batch, _ = run_step(iteration, first_states(iteration), 1)
    parts = np.asarray(batch.greedy_function_scores), np.asarray(batch["greedy_helpful_scores"])
    assert parts[1].std() > 0
    np.testing.assert_allclose(batch.greedy_scores, parts[0] + 0.5 * parts[1], rtol=1e-5, atol=1e-6)


def test_a_language_model_has_no_score_to_weigh(tmp_path):
    with pytest.raises(ConfigError, match="config.models.0.weight=1 .*: other is a language model"):
        changes = [("models", "[{name: other, kind: causal_lm, weight: 1.0}]")]
        load_config("grpo", changes)


@pytest.mark.nightly
def test_the_example_learns_a_cost_and_subtracts_it(tmp_path):
    sizes = {"data.train_batch_size": PROMPTS, "rollout.n": N, "actor.ppo_mini_batch_size": PROMPTS}
    changes = [(key, str(size)) for key, size in sizes.items()]
    config = load_config(str(EXAMPLE), [("run_dir", str(tmp_path)), *changes])
    mesh = make_mesh(devices=jax.devices()[:1])
    plan = plan_online(config, load_tokenizer("char"), mesh, ArrayReward(even_tokens))
    assert "cost" not in plan.frozen
    (iteration,) = plan.phases
    states, errors = untrained_states(plan), []
    for step in range(1, 7):
        states, batch, metrics = run_step(iteration, states, step)
        error = np.square(batch["cost_scores"] - np.asarray(batch.mask).mean(axis=1)).mean()
        np.testing.assert_allclose(metrics["cost/loss"], error, rtol=1e-4)
        errors.append(error)
    assert errors[-1] < 0.5 * errors[0]
    subtracted = batch.function_scores - np.asarray(batch.scores)
    costs = np.maximum(batch["cost_scores"], 0)
    assert costs.min() > 0
    np.testing.assert_allclose(subtracted, 0.1 * costs, atol=1e-6)


def test_the_page_has_the_stage_of_the_example():
    page = (DOCS / "add-a-stage.md").read_text()
    assert EXAMPLE.read_text().split("\n\n\n")[1] in page  # word for word


LOSSES = """
import jax.numpy as jnp


def regression(new_token_scores, mask, labels):
    return jnp.square(new_token_scores - labels[:, None]), {"cost/label": labels}


def outcome(logprobs, reference_logprobs, mask, scores, *, beta=0.5):
    logit = beta * ((logprobs - reference_logprobs) * mask).sum(axis=1)
    return jnp.logaddexp(0.0, logit) - scores * logit, {"cost/logit": logit}


def summed(new_scores):
    return new_scores.sum(), {}
"""
LABELS = """

from dataclasses import dataclass

from jaxrl_llm.program.stage import Stage, StageOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels(Stage):
    name = "labels"
    writes = ("labels",)

    def __call__(self, state, step, *, response_lengths):
        return StageOutput({"labels": response_lengths / 5.0})


def labels() -> Stage:
    return Labels()
"""


def learning(folder: Path, loss: str, *, stages=(), **model) -> Config:
    """GRPO with a model that learns by SGD, in one optimizer step an iteration."""
    (folder / "losses.py").write_text(LOSSES + LABELS)
    sgd = OptimizerConfig(
        name="sgd", learning_rate=0.5, b1=0.0, weight_decay=0.0, max_grad_norm=1e9
    )
    update = OwnUpdate(loss=Custom(path=f"{folder}/losses.py:{loss}"), optimizer=sgd)
    config = config_of("grpo")
    config = replace(config, actor=replace(config.actor, ppo_mini_batch_size=PROMPTS))
    model = ExtraModelConfig(name="cost", hf_config=MODEL, update=update, **model)
    own = tuple(Custom(path=f"{folder}/losses.py:{name}") for name in stages)
    return replace(config, models=(model,), stages=own)


def padded(batch) -> dict:
    fields = (batch.prompts, batch.prompt_lengths, batch.responses, batch.response_lengths)
    return sample_fields(*fields)


def token_error(params, batch, role):
    """The mean squared error of the scores of tokens, from the scores of all shorter answers."""
    total = 0.0
    for length in range(1, batch.responses.shape[1] + 1):
        lengths = np.minimum(length, batch.response_lengths)
        part = padded(replace(batch, response_lengths=lengths))
        how = {"spec": role.spec, "settings": role.forward}
        scores = response_scores(params, rows_of(part), lengths, **how)
        has_token = length <= np.asarray(batch.response_lengths)
        total += (((scores - batch.response_lengths / 5.0) ** 2) * has_token).sum()
    return total / batch.response_lengths.sum()


def outcome_error(params, batch, role):
    """The cross-entropy of the score and the summed log-ratio."""
    how = {"spec": role.spec, "settings": role.forward}
    logprobs, _ = response_logprobs(params, rows_of(padded(batch)), **how)
    logit = 0.5 * ((logprobs - batch.reference_logprobs) * batch.mask).sum(axis=1)
    p = jax.nn.sigmoid(logit)
    return -(batch.scores * jnp.log(p) + (1 - batch.scores) * jnp.log(1 - p)).mean()


REGRESSION = "regression", token_error, {"stages": ("labels",)}
OUTCOME = "outcome", outcome_error, {"kind": "causal_lm"}


@pytest.mark.parametrize(
    ("loss", "expected", "how", "tokens"),
    [
        (*REGRESSION, 0),
        pytest.param(*OUTCOME, 24, marks=pytest.mark.nightly),
        pytest.param(*REGRESSION, 24, marks=pytest.mark.slow),
        pytest.param(*OUTCOME, 0, marks=pytest.mark.slow),
    ],
)
def test_a_model_of_the_users_takes_a_step_of_its_loss(tmp_path, loss, expected, how, tokens):
    config = learning(tmp_path, loss, **how)
    config = packed(config, tokens) if tokens else in_micro_batches(config, 8)
    iteration = open_iteration(config)
    states, role = first_states(iteration), iteration.roles["cost"]
    before = jax.tree.map(np.asarray, states["cost"].params)
    after, batch, metrics = run_step(iteration, states, 1)
    value, gradient = jax.jit(jax.value_and_grad(partial(expected, batch=batch, role=role)))(before)
    np.testing.assert_allclose(metrics["cost/loss"], value, rtol=1e-4)
    moved = jax.tree.map(lambda old, new: (old - new) / 0.5, before, after["cost"].params)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, moved, gradient)
    assert int(after["cost"].step) == 1 and metrics["cost/grad_norm"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("apart", [False, True])
def test_a_model_learns_on_a_mesh_what_it_learns_on_one_device(tmp_path, apart):
    config = in_micro_batches(learning(tmp_path, "regression", stages=("labels",)), 4)
    devices = jax.devices()
    mesh, own = (
        make_mesh(data=2, fsdp=2, devices=devices[:4]),
        make_mesh(fsdp=2, devices=devices[4:6]),
    )
    placed = open_iteration(config, mesh, role_meshes={"cost": own} if apart else None)
    results = []
    for iteration in (open_iteration(config), placed):
        states = first_states(iteration)
        for step in (1, 2):
            states, _, metrics = run_step(iteration, states, step)
        results.append((fetch(states["cost"].params), metrics["cost/loss"]))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *results)
    expected = set((own if apart else mesh).devices.flat)
    assert jax.tree.leaves(states["cost"].params)[0].sharding.device_set == expected


def test_the_planner_counts_the_optimizer_and_keeps_the_settings_of_a_model():
    config = replace(load_config(str(EXAMPLE), []), warmup=None)
    work = work_of(config)
    device = Devices(mesh=config.mesh, hosts=1, rates=rates_of("h200"))
    cost, actor = work.models["cost"], work.models["actor"]
    assert kept(cost, device) > kept(actor, device) > 0  # by the head, with two moments each
    layouts = best_layouts(work, 1, 1, rates_of("h200"))
    assert {each.estimate.work.models["cost"].settings.remat for each in layouts} == {"none"}
    assert {job.role for job in work.jobs if job.does == "update"} == {"actor", "cost"}


def test_a_stage_reads_the_scores_of_tokens(tmp_path):
    """The score of each token is the score of the answer that ends there."""
    file = tmp_path / "own.py"
    file.write_text(
        OWN.replace("*, mask)", "*, mask, cost_token_scores)").replace(
            "mask / mask.sum(axis=1, keepdims=True).clip(1)", "cost_token_scores"
        )
    )
    algorithm = Custom(path=f"{file}:weighted")
    iteration = open_iteration(replace(with_stage(f"{file}:weights", COST), algorithm=algorithm))
    states, role = first_states(iteration), iteration.roles["cost"]
    params = jax.tree.map(jnp.copy, states["cost"])
    _, batch, _ = run_step(iteration, states, 1)
    for length in range(1, batch.responses.shape[1] + 1):
        lengths = np.minimum(length, batch.response_lengths)
        rows = rows_of(padded(replace(batch, response_lengths=lengths)))
        scores = response_scores(params, rows, lengths, spec=role.spec, settings=role.forward)
        ours = np.asarray(batch["length_weights"])[:, length - 1]
        expected = np.where(length <= np.asarray(batch.response_lengths), scores, 0)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_without_a_value_for_each_sample_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cost returned 'cost/loss' of shape .*it must be .B.=.32"):
        open_iteration(learning(tmp_path, "summed")).trace()


def teacher(name: str, weight: float, kind: str = "causal_lm") -> ExtraModelConfig:
    return ExtraModelConfig(name=name, kind=kind, hf_config=MODEL, teacher_weight=weight)


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_teachers_give_the_weighted_mean_of_the_kls(own):
    """The advantage of distillation is minus the sampled KL."""
    models = (teacher("arithmetic", 3.0), teacher("code", 1.0))
    config = replace(config_of("distillation"), models=models)
    weights = {"arithmetic_logprobs": 3.0, "code_logprobs": 1.0}
    if own:
        config = replace(config, teacher=TeacherConfig(hf_config=MODEL, weight=4.0))
        weights["teacher_model_logprobs"] = 4.0
    iteration = open_iteration(config)
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    mask, old = np.asarray(batch.mask), np.asarray(batch.old_logprobs)
    fields = [np.asarray(batch[name]) for name in weights]
    assert np.abs(fields[0] - fields[1]).max() > 0.1
    kls = [((old - field) * mask).sum() / mask.sum() for field in fields]
    expected = np.average(kls, weights=list(weights.values()))
    np.testing.assert_allclose(-(batch.advantages * mask).sum() / mask.sum(), expected, rtol=1e-4)


def test_teachers_that_nothing_reads_are_refused():
    config = replace(config_of("grpo"), models=(teacher("math", 1.0),))
    with pytest.raises(ConfigError, match="math has a teacher_weight.*--config.algorithm=distill"):
        open_iteration(config)


OWN = """
from dataclasses import dataclass, replace

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.config import GRPO
from jaxrl_llm.program.stage import Stage, StageOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class Unread(Stage):
    name = "unread"
    writes = ("nobody",)

    def __call__(self, state, step, *, scores):
        return StageOutput({"nobody": scores})


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights(Stage):
    name = "weights"
    writes = ("length_weights",)
    returned: str = "length_weights"

    def __call__(self, state, step, *, mask):
        return StageOutput({self.returned: mask / mask.sum(axis=1, keepdims=True).clip(1)})


def unread() -> Stage:
    return Unread()


def weights(*, returned: str = "length_weights") -> Stage:
    return Weights(returned=returned)


def no_stage() -> int:
    return 1


def weighted() -> Algorithm:
    algorithm = build_online(GRPO(use_kl_loss=False))

    def loss(logprobs, old_logprobs, advantages, mask, length_weights):
        per_token, metrics = algorithm.policy_loss(logprobs, old_logprobs, advantages, mask)
        return per_token * length_weights, metrics

    return replace(algorithm, policy_loss=loss, own_fields=("length_weights",))
"""


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_loss_reads_the_field_of_a_stage_of_the_users(own):
    algorithm = Custom(path=f"{own}:weighted")
    config = replace(with_stage(f"{own}:weights"), algorithm=algorithm)
    iteration = open_iteration(config)
    assert "weights" in {stage.name for stage in iteration.stages}
    batch = iteration.trace()
    assert batch["length_weights"].shape == batch.mask.shape
    with pytest.raises(ValueError, match="'update_actor' reads the field 'length_weights'"):
        open_iteration(replace(config, stages=()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            ('name = "weights"', 'name = "weights"\n    role = "hosts"'),
            "'weights' has the role 'hosts', and this run has device, host, .*you mean 'host'",
        ),
    ],
)
def test_declarations_of_a_stage_are_checked(own, changed, message):
    file = Path(own)
    assert changed[0] in OWN
    file.write_text(OWN.replace(*changed))
    with pytest.raises(ConfigError, match=message):
        open_iteration(with_stage(f"{own}:weights"))


def test_what_cannot_work_is_refused_with_the_remedy(own):
    with pytest.raises(ConfigError, match="nothing reads what the stage 'unread' writes"):
        open_iteration(with_stage(f"{own}:unread"))
    with pytest.raises(ConfigError, match="own.py:no_stage gave int, not a Stage"):
        open_iteration(with_stage(f"{own}:no_stage"))
    with pytest.raises(ValueError, match="did you mean 'function_scores'|reads the field 'cost_sc"):
        open_iteration(with_stage(f"{EXAMPLE}:cost_penalty"))
    with pytest.raises(ValueError, match="name\n.*a role of the trainer has that name"):
        replace(COST, name="critic")
    small = replace(COST, hf_config=MODEL | {"vocab_size": 12})
    with pytest.raises(ConfigError, match="cost has a vocabulary of 12 tokens and the actor"):
        open_iteration(with_stage(f"{EXAMPLE}:cost_penalty", small))
    config = with_stage(f"{own}:weights")
    critic = replace(config.critic, hf_config=MODEL | {"vocab_size": 12})
    with pytest.raises(ConfigError, match="critic has a vocabulary of 12 tokens and the actor"):
        open_iteration(replace(config, critic=critic))


def test_keys_that_are_not_those_of_writes_are_refused_when_the_plan_is_traced(own):
    algorithm = Custom(path=f"{own}:weighted")
    config = with_stage(f"{own}:weights", returned="lenght_weights")
    iteration = open_iteration(replace(config, algorithm=algorithm))
    with pytest.raises(ValueError, match="writes length_weights and returned lenght_weights"):
        iteration.trace()
