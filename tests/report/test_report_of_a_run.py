"""The report that a whole run leaves, and the numbers of tokens in its trace."""

import json

import numpy as np
from tiny_run import TOTAL_STEPS, TinyRun

from jaxrl_llm.observability.jsonl import read_jsonl


def test_a_run_leaves_its_report(ppo_run: TinyRun):
    text = (ppo_run.run_dir / "report.html").read_text()
    (run,) = json.loads(text.split('id="data">')[1].split("</script")[0])["runs"]
    assert run["curves"]["critic/score/mean"]["steps"] == list(range(1, TOTAL_STEPS + 1))
    assert "warmup: sft/loss" in run["curves"]
    assert {s["step"] for s in run["samples"]} == set(range(TOTAL_STEPS + 1))  # 0: held out
    assert run["texts"]["1"] == "<|eos|>"


def test_the_trace_has_numbers_of_the_first_samples_tokens(ppo_run: TinyRun):
    rows = list(read_jsonl(sorted((ppo_run.run_dir / "trace").glob("train-*.jsonl"))))
    with_details = [row for row in rows if row["details"]]
    assert {row["index"] for row in with_details} == set(range(16))
    for row in with_details:
        numbers = {
            name: np.broadcast_to(x, len(row["tokens"])) for name, x in row["details"].items()
        }
        assert set(numbers) == {"old_logprobs", "reference_logprobs", "values", "advantages"}
        # The trainer's log-probs are the sampler's, up to rounding.
        np.testing.assert_allclose(numbers["old_logprobs"], row["logprobs"], atol=1e-4)
    scored = [row for row in with_details if row["ground_truth"] is not None]
    assert scored and all(row["ground_truth"].lstrip("-").isdigit() for row in scored)
