"""Turns inside the generation program: the record of the host, exact resume, your own class."""

import shutil

import numpy as np
import pytest
from agents.test_documented_agents import blocks
from further import further
from tiny_run import TinyRun, assert_same_bits
from trainer.test_conversing import SIZES, metrics, run

import jaxrl_llm as rl
from jaxrl_llm.plan.conversing import STATE_KEYS, TURN_IDS, Converse
from jaxrl_llm.trainer.output import RunOutput

ROWS = [{"prompt": f"{i}:", "ground_truth": str(i)} for i in range(1, 17)]
BASE = {
    "data.max_response_length": 96,
    "data.max_prompt_length": 16,
    "actor.hf_config.max_position_embeddings": 128,
    "reward.process_rewards": True,
    "algorithm": {"kind": "gigpo"},
}


def turns_of(sample):
    """Spans, messages and rewards; the program writes 0 for a turn without a reward."""
    spans = [(turn["start"], turn["end"], turn["message"]) for turn in sample["turns"]]
    return spans, [turn["reward"] or 0.0 for turn in sample["turns"]]


@pytest.mark.parametrize(
    ("name", "changes"),
    further(
        [
            ("maze", {"rollout.max_turns": 4, "rollout.mask_truncated": True}),
            ("guess", {"rollout.max_turn_tokens": 40, "rollout.num_slots": 3}),
            ("integer_calculator", {"data.max_response_length": 60, "rollout.top_k": 40}),
        ]
    ),
)
def test_one_program_has_the_record_of_the_host(tmp_path, name, changes):
    """Log-probs differ by rounding: XLA sums a softmax in another order in another program."""
    changes = BASE | {"rollout.environment": name, "rollout.n": 4} | changes
    host = run(tmp_path / "host", rows=ROWS, **changes, **{"rollout.in_graph": False})
    mine = run(tmp_path / "in_graph", rows=ROWS, **changes)
    assert len(host) == len(mine) == 32
    first = [x for x in zip(host, mine, strict=True) if x[0]["step"] == 1]
    for expected, sample in first:  # the policies of step 2 differ by rounding
        for key in ("tokens", "score", "stop_reason", "messages", "prompt_ids", "finished"):
            assert sample[key] == expected[key], key
        assert turns_of(sample) == turns_of(expected)
        np.testing.assert_allclose(sample["logprobs"], expected["logprobs"], atol=1e-5)
        zeros = [x == 0 for x in expected["logprobs"]]
        assert [x == 0 for x in sample["logprobs"]] == zeros
    assert max(len(sample["turns"]) for _, sample in first) >= 3
    assert len({sample["stop_reason"] for _, sample in first}) >= 2
    rows = [next(x for x in metrics(tmp_path / kind) if "num_turns/mean" in x)
            for kind in ("host", "in_graph")]  # fmt: skip
    one = [name for name in rows[1] if name.startswith("timing_s/gen+")]
    assert len(one) == 1 and one[0].endswith("+adv+update_actor"), one
    for key in rows[1]:
        if key.startswith(("num_turns/", "stop/", "observation_length/", "turn_length/")):
            assert rows[1][key] == pytest.approx(rows[0].get(key, 0.0)), key


@pytest.mark.nightly
def test_equal_states_have_equal_keys(tmp_path, monkeypatch):
    """Keys of the program are another hash than the host's, with the same groups."""
    seen, call, note = {}, Converse.__call__, RunOutput.rollout

    def kept(self, context, step, *, sample_ids, group_ids, states):
        fields = {"sample_ids": sample_ids, "group_ids": group_ids, "states": states}
        out = call(self, context, step, **fields)
        seen["host"] = [np.asarray(out.writes[name]) for name in (TURN_IDS, STATE_KEYS)]
        return out

    def noted(self, step, context, batch):
        seen.setdefault("in_graph", [np.asarray(batch[name]) for name in (TURN_IDS, STATE_KEYS)])
        return note(self, step, context, batch)

    monkeypatch.setattr(Converse, "__call__", kept)
    changes = BASE | {"rollout.environment": "guess", "rollout.max_turn_tokens": 40}
    changes |= {"total_steps": 1, "rollout.n": 8}
    run(tmp_path / "host", rows=ROWS, **changes, **{"rollout.in_graph": False})
    monkeypatch.setattr(RunOutput, "rollout", noted)
    run(tmp_path / "in_graph", rows=ROWS, **changes)
    (turns, keys), (my_turns, my_keys) = seen["host"], seen["in_graph"]
    np.testing.assert_array_equal(turns, my_turns)
    pairs = {*zip(keys[turns >= 0].tolist(), my_keys[turns >= 0].tolist(), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) >= 2


@pytest.mark.nightly
def test_a_run_resumes_with_the_same_bits(tmp_path):
    changes = BASE | {"rollout.environment": "maze", "total_steps": 4, "save_every": 2}
    changes |= {"validation.every": 2}
    folder = tmp_path / "run"
    config = rl.load_config("grpo", SIZES | {"run_dir": str(folder)} | changes)
    trained = rl.train(config, train_data=ROWS, val_data=ROWS)
    assert trained.run_dir == folder
    whole = TinyRun(tmp_path)
    expected, weights = whole.metrics(), whole.weights(4)
    samples = {kind: whole.samples(kind) for kind in ("train", "validation")}
    shutil.rmtree(folder / "checkpoints" / "global_step_4")
    rl.train(config, train_data=ROWS, val_data=ROWS)
    assert whole.metrics() == expected and len(expected) == 5
    assert {kind: whole.samples(kind) for kind in samples} == samples
    assert_same_bits(whole.weights(4), weights)


@pytest.fixture
def countdown(tmp_path):
    """The class of the page, in a file."""
    file = tmp_path / "my_games.py"
    (text,) = [x for x in blocks("add-an-environment.md") if "step_tokens" in x]
    file.write_text(text)
    return f"{file}:TokenCountdown"


@pytest.mark.nightly
def test_the_class_of_the_page(tmp_path, countdown):
    """Its answers are replayed by hand from the sampled text."""
    changes = BASE | {"rollout.environment": countdown, "data.max_response_length": 40}
    changes |= {"rollout.environment.0.settings": "{start: 4}", "rollout.n": 8, "total_steps": 1}
    samples = run(tmp_path / "run", rows=ROWS, **changes, **{"rollout.temperature": 0.5})
    lost = 0
    for sample in samples:
        left, answers = 4, [m["content"] for m in sample["messages"]]
        assert sample["prompt"].endswith(":")
        assert answers[0] == "4\n"
        for turn, said in enumerate(answers[1::2]):
            ended = turn < len(sample["turns"]) - 1
            left -= int(said) if said in ("1", "2", "3") else 0
            lost += left > 0 and not ended
            if ended:
                assert answers[2 * turn + 2] == f"{left}\n"
        assert sample["score"] == (sample["stop_reason"] == "env_done" and left == 0)
    assert lost


@pytest.mark.nightly
def test_what_a_class_of_tokens_does_not_go_with(tmp_path, countdown):
    """It has no other form, so it is refused. Ours is driven by the host then."""
    refused = {
        "reward.functions": ["exact_answer"],
        "rollout.tools": ["calculator"],
        "max_staleness": 1,
        "placement.rollout": "1",
        "rollout.in_graph": False,
    }
    for key, value in refused.items():
        changes = SIZES | BASE | {"rollout.environment": countdown, key: value}
        with pytest.raises(rl.ConfigError, match=rf"TokenCountdown has step_tokens.*{key}"):
            rl.train(rl.load_config("grpo", changes), train_data=ROWS)
    samples = run(
        tmp_path / "run", rows=ROWS, **BASE, **{"rollout.environment": "guess"},
        **{"reward.functions": ["exact_answer"], "total_steps": 1, "reward.weights": [0.0]},
    )  # fmt: skip
    assert len(samples) == 8
