"""A run's folder written by hand, with texts that try to become markup or script."""

import json
from pathlib import Path
from typing import Any

ATTACKS = (
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<!--<script>window.pwned = 1</script>-->",
    "\u2028\u2029 javascript:window.pwned=1 \ud800 %%DATA%% & ]]>",
)
STEPS = 30
A_STEP = 4


def sample(step: int, index: int, **changes: Any) -> dict[str, Any]:
    """A row of the trace: four tokens, with what the update knew of them."""
    row = {
        "step": step,
        "policy_version": step - 1,
        "index": index,
        "data_source": "sums" if index % 2 else "products",
        "row": index,
        "prompt": f"user: what is {step}+{index}?",
        "prompt_ids": [5, 6],
        "question": f"what is {step}+{index}?",
        "ground_truth": str(step + index),
        "response": f"answer {step + index} " + ATTACKS[index % len(ATTACKS)],
        "tokens": [0, 1, 2, 3],
        "logprobs": [-0.1, -1.0, -2.0, -0.5],
        "finished": True,
        "score": float(index % 2),
        "parts": {"exact_answer": float(index % 2)},
        "extras": {"exact_answer/reason": ATTACKS[0]},
        "failures": [],
        "details": {"old_logprobs": [-0.1, -1.0, -2.0, 0.19315], "advantages": 0.75},
    }
    return row | changes


def talk(step: int, index: int, **changes: Any) -> dict[str, Any]:
    """A row of two turns: a call, its result (one token), and an answer."""

    def turn(message: int, start: int, end: int, reward: float | None, *calls: str) -> Any:
        failed, seconds = int("wrong_arguments" in calls), 0.25 if calls else 0.0
        place = {"start": start, "end": end, "message": message, "tool_s": seconds}
        return place | {"reward": reward, "failed": failed, "calls": list(calls)}

    call = {"name": "weather", "arguments": '{"town": "Bern"}'}
    messages = [
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look it up.",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "name": "weather", "content": ATTACKS[0]},
        {"role": "assistant", "content": "21 degrees"},
    ]
    extras = {
        "grader/reason": "right",
        "trajectory": f"{step}-{index}",
        "stop_reason": "completed",
        "turns": [turn(1, 0, 2, None, "wrong_arguments"), turn(3, 3, 4, 0.5)],
        "messages": messages,
        "tool_s": 0.25,
    }
    return sample(step, index, extras=extras, response="21 degrees") | changes


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def metrics(step: int) -> dict[str, float]:
    return {
        "training/global_step": step,
        "critic/score/mean": step / STEPS,
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 3.0,
        "timing_s/step": 4.0,
        "perf/max_memory_allocated_gb": 10.0,
    }


def write_run(folder: Path, learning_rate: float = 1e-3) -> Path:
    """A run of STEPS steps, A_STEP samples each, with a warm-up, an alarm and a tokenizer."""
    for name in ("trace", "warmup", "checkpoints/huggingface"):
        (folder / name).mkdir(parents=True)
    config = {"seed": 0, "actor": {"learning_rate": learning_rate, "name": ATTACKS[1]}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "about.json").write_text(json.dumps({"device": "4 x card", "model": ATTACKS[0]}))
    (folder / "metrics.jsonl").write_text(lines([metrics(step) for step in range(1, STEPS + 1)]))
    warmup = [{"training/global_step": step, "loss": 1 / step} for step in range(1, 5)]
    (folder / "warmup" / "metrics.jsonl").write_text(lines(warmup))
    alarm = {"step": 7, "name": "entropy", "metric": "critic/score/mean", "value": 0.1}
    alarm |= {"threshold": 0.2, "action": "warn", "look_at": ATTACKS[1]}
    (folder / "events.jsonl").write_text(lines([alarm]))
    rows = [sample(step, index) for step in range(1, STEPS + 1) for index in range(A_STEP)]
    (folder / "trace" / "train-00000000.jsonl").write_text(lines(rows))
    held_out = [sample(step, 0, score=1.0) for step in range(0, STEPS + 1, 10)]
    (folder / "trace" / "validation-00000000.jsonl").write_text(lines(held_out))
    write_tokenizer(folder / "checkpoints" / "huggingface" / "tokenizer.json")
    return folder


def write_tokenizer(file: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"answer": 0, " 31 ": 1, "<b>bold</b>": 2, ATTACKS[0]: 3}
    Tokenizer(WordLevel(words, unk_token="answer")).save(str(file))
