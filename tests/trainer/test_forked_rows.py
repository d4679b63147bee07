"""A run whose chat template drops thinking: each turn after it begins a row of the same sample.

A model of random weights thinks because its vocabulary has tokens that are a whole thinking.
"""

import json

import pytest
from agents.test_forks import DROPS
from chat_tokenizer import write_chat_tokenizer
from further import further
from tiny import EXPERTS, HYBRID
from tiny_run import TinyRun, assert_same_bits
from trainer.test_conversing import SIZES, metrics

import jaxrl_llm as rl
from jaxrl_llm.report.conversations import conversation
from jaxrl_llm.tokenizer import load_tokenizer

THOUGHTS = [f"<think>h{i}</think>" for i in range(300)]
ROWS = [{"prompt": [{"role": "user", "content": f"{a}+1"}], "answer": "7"} for a in range(8)]
TIMED = ("env_s/", "rollout/decode_steps")
PACKED = {"actor.micro_batch_tokens": 512}
SPLIT = {"mesh.sequence": 2, "actor.micro_batch_tokens": 512}
ROUTED = PACKED | {f"actor.hf_config.{key}": value for key, value in EXPERTS.items()}
RECURRENT = {f"actor.hf_config.{key}": value for key, value in HYBRID.items()}
CRITIC = {"algorithm": "ppo", "critic.micro_batch_tokens": 512}


def write_tokenizer(folder):
    write_chat_tokenizer(folder, template=DROPS)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    for thought in THOUGHTS:
        stored["model"]["vocab"][thought] = len(stored["model"]["vocab"])
    file.write_text(json.dumps(stored))
    return folder


def keys_of(folder):
    path = write_tokenizer(folder / "tokenizer")
    tokenizer = load_tokenizer(str(path))
    letters = [tokenizer.encode(chr(code))[0] for code in range(ord("A"), ord("z") + 1)]
    return tokenizer, SIZES | {
        "run_dir": str(folder / "run"), "data.tokenizer": str(path), "total_steps": 1,
        "data.max_prompt_length": 40, "data.max_response_length": 400,
        "data.columns.ground_truth": "answer",
        "actor.hf_config.max_position_embeddings": 512, "rollout.n": 4,
        "rollout.stop_token_ids": letters, "rollout.max_turn_tokens": 12,
        "rollout.environment": [{"kind": "retry", "attempts": 4}],
        "rollout.earlier_thinking": "fork", "rollout.max_rows": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    further([{}, PACKED, CRITIC, SPLIT, RECURRENT, ROUTED]),
    ids=["padded", "packed", "critic", "split", "recurrent", "experts"],
)
def test_the_log_probs_of_each_row_are_the_samplers(tmp_path, changes):
    tokenizer, keys = keys_of(tmp_path)
    config = rl.load_config("grpo", keys | changes)
    rl.train(config, train_data=ROWS)
    (step,) = [line for line in metrics(tmp_path / "run") if "num_turns/mean" in line]
    assert step["rollout/rows/max"] == 3 and step["rollout/rows/mean"] > 1.2
    assert step["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
    assert step["env/masked_frac"] == 0
    lines = [x for f in (tmp_path / "run" / "trace").glob("train*") for x in f.open()]
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 16
    for sample in samples:
        starts = [0, *sample["extras"].get("row_starts", ())]
        shown = conversation(sample["extras"], str)["messages"]
        turns = [message for message in shown if "turn" in message]
        for turn, message in zip(sample["extras"]["turns"], turns, strict=True):
            row = sum(start <= turn["start"] for start in starts)
            assert message.get("row", 1) == row
    several = [s for s in samples if len(s["extras"]["turns"]) > 1]
    assert any("<think>" not in tokenizer.decode(s["tokens"][s["extras"]["turns"][0]["end"] :
               s["extras"]["turns"][1]["start"]]) for s in several)  # fmt: skip


@pytest.mark.nightly
def test_a_run_that_goes_on_has_the_same_bits(tmp_path):
    """A checkpoint holds the rows of the next step."""
    _, keys = keys_of(tmp_path)
    keys |= {"total_steps": 3, "save_every": 1, "max_staleness": 1, "checkpoint.keep_latest": 9}
    rl.train(rl.load_config("grpo", keys), train_data=ROWS)
    whole, again = TinyRun(tmp_path), TinyRun(tmp_path / "again")
    keys |= {"resume": str(whole.step_path(1)), "run_dir": str(tmp_path / "again" / "run")}
    rl.train(rl.load_config("grpo", keys), train_data=ROWS)
    assert_same_bits(again.weights(3), whole.weights(3))
    metrics = [
        {name: x for name, x in run.metrics()[step].items() if not name.startswith(TIMED)}
        for run in (whole, again)
        for step in (2, 3)
    ]
    assert metrics[:2] == metrics[2:] and metrics[0]["rollout/rows/max"] == 3
