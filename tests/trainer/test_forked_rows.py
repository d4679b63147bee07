"""A run whose chat template drops thinking: each turn after it begins a row of the same sample.

A model of random weights thinks because its vocabulary has tokens that are a whole thinking.
"""

import json

import pytest
from agents.test_forks import DROPS
from chat_tokenizer import write_chat_tokenizer
from further import further
from trainer.test_conversing import SIZES, metrics

import jaxrl_llm as rl
from jaxrl_llm.tokenizer import load_tokenizer

THOUGHTS = [f"<think>h{i}</think>" for i in range(300)]
ROWS = [{"prompt": [{"role": "user", "content": f"{a}+1"}], "answer": "7"} for a in range(8)]
PACKED = {"actor.micro_batch_tokens": 512}
CRITIC = {"algorithm": "ppo", "critic.micro_batch_tokens": 512}


def write_tokenizer(folder):
    write_chat_tokenizer(folder, template=DROPS)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    for thought in THOUGHTS:
        stored["model"]["vocab"][thought] = len(stored["model"]["vocab"])
    file.write_text(json.dumps(stored))
    return folder


@pytest.mark.parametrize(
    "changes", further([{}, PACKED, CRITIC]), ids=["padded", "packed", "critic"]
)
def test_the_log_probs_of_each_row_are_the_samplers(tmp_path, changes):
    path = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(path))
    letters = [tokenizer.encode(chr(code))[0] for code in range(ord("A"), ord("z") + 1)]
    config = rl.load_config("grpo", SIZES | {
        "run_dir": str(tmp_path / "run"), "data.tokenizer": str(path), "total_steps": 1,
        "data.max_prompt_length": 40, "data.max_response_length": 400,
        "data.columns.ground_truth": "answer",
        "actor.hf_config.max_position_embeddings": 512, "rollout.n": 4,
        "rollout.stop_token_ids": letters, "rollout.max_turn_tokens": 12,
        "rollout.environment": [{"kind": "retry", "attempts": 4}],
        "rollout.earlier_thinking": "fork", "rollout.max_rows": 3,
    } | changes)  # fmt: skip
    rl.train(config, train_data=ROWS)
    (step,) = [line for line in metrics(tmp_path / "run") if "num_turns/mean" in line]
    assert step["rollout/rows/max"] == 3 and step["rollout/rows/mean"] > 1.2
    assert step["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
    assert step["env/masked_frac"] == 0
    lines = [x for f in (tmp_path / "run" / "trace").glob("train*") for x in f.open()]
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 16
    several = [s for s in samples if len(s["extras"]["turns"]) > 1]
    assert any("<think>" not in tokenizer.decode(s["tokens"][s["extras"]["turns"][0]["end"] :
               s["extras"]["turns"][1]["start"]]) for s in several)  # fmt: skip
