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


HELD_OUT = {0: 0.25, 10: 0.5, 20: 0.875, 30: 0.75}  # by step


def metrics(step: int) -> dict[str, float]:
    """Step 1 compiles. Nothing changes the memory; rewards are scores, as without a KL penalty."""
    compiling = 96.0 * (step == 1)
    row: dict[str, float] = {
        "training/global_step": step,
        "critic/score/mean": step / STEPS,
        "critic/rewards/mean": step / STEPS,
        "timing_s/gen": 1.0 + compiling,
        "timing_s/update_actor": 3.0 - step / 1000,
        "timing_s/step": 4.0 + compiling,
        "perf/compilations": 3.0 * (step == 1),
        "perf/max_memory_allocated_gb": 10.0,
        "perf/throughput": 100.0 + step,
    }
    return row | ({"val-core/sums/acc/mean@1": HELD_OUT[step]} if step in HELD_OUT else {})


def write_run(folder: Path, learning_rate: float = 1e-3) -> Path:
    """A run of STEPS steps, A_STEP samples each, with a warm-up, an alarm and a tokenizer."""
    for name in ("trace", "warmup", "checkpoints/huggingface"):
        (folder / name).mkdir(parents=True)
    config = {"seed": 0, "run_dir": str(folder), "total_steps": STEPS + 1}
    config |= {"actor": {"learning_rate": learning_rate, "name": ATTACKS[1]}}
    config |= {"alarms": {"entropy": {"action": "warn", "threshold": 0.02}, "nonfinite": "x"}}
    config["alarms"] |= {"reward_std": {"action": "warn", "threshold": 1e-6}, "kl": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "about.json").write_text(json.dumps({"device": "4 x card", "model": ATTACKS[0]}))
    first = {"training/global_step": 0, "val-core/sums/acc/mean@1": HELD_OUT[0]}
    rows = [first, *(metrics(step) for step in range(1, STEPS + 1))]
    (folder / "metrics.jsonl").write_text(lines(rows))
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
