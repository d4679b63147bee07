"""How many calls lie between the command and the formula of the loss: docs/architecture.md."""

import re
import traceback
from pathlib import Path

import pytest
from tiny_run import TinyRun

import jaxrl_llm
from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.config import load_config
from jaxrl_llm.plan.online import Iteration, OnlinePlan
from jaxrl_llm.trainer.loop import train

PACKAGE = Path(jaxrl_llm.__file__).parent
DOCS = PACKAGE.parent / "docs" / "architecture.md"
FORMULA = policy_losses.ppo_clip


class Stop(Exception):
    """The chain was seen."""


# The calls that a run has beyond those of the table.
MORE = {
    "": [],
    "actor.lora.rank": ["joined_loss"],
    "mesh.data": ["_sums_of_group"],
}


@pytest.mark.parametrize("key", MORE)
def test_the_chain_from_the_command_to_the_formula(key, tmp_path, monkeypatch):
    """Two mini-batches of two micro-batches, so that every loop is in the chain."""
    chain: list[tuple[str, str]] = []

    def formula(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high, clip_c):
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(PACKAGE))]
        if any(f.name == "run" and f.filename.endswith("program/program.py") for f in frames):
            found = [(str(Path(f.filename).relative_to(PACKAGE)), f.name) for f in frames]
            chain.extend([*found, ("algorithms/policy_losses.py", "ppo_clip")])
            raise Stop
        settings = {"clip_low": clip_low, "clip_high": clip_high, "clip_c": clip_c}
        return FORMULA(logprobs, old_logprobs, advantages, mask, **settings)

    monkeypatch.setattr(policy_losses, "ppo_clip", formula)
    # Nothing is traced ahead: the chain is that of a step.
    monkeypatch.setattr(OnlinePlan, "trace", lambda self, *_: None)
    monkeypatch.setattr(Iteration, "compile_ahead", lambda self: None)
    run = TinyRun(tmp_path)
    overrides = {
        "run_dir": str(run.run_dir),
        "algorithm": "ppo",
        "warmup": "null",
        "validation.before_train": "false",
        "actor.micro_batch_size": "4",
        "critic.optimizer.offload": "false",
        "log.tensorboard": "false",
    }
    overrides |= {key: "2"} if key else {}
    config = load_config(str(tmp_path / "tiny.py"), list(overrides.items()))
    with pytest.raises(Stop):
        train(config)
    names = [name for _, name in chain]
    # `train` is call 1: the command itself is call 0.
    assert names.index("train_step") + 1 <= 6, chain
    assert len(chain) <= 9 + len(MORE[key]), [str(call) for call in chain]
    assert [name for name in names if name in MORE[key]] == MORE[key]
    chain = [call for call in chain if call[1] not in MORE[key]]
    rows = re.findall(r"^\| [1-9] \| `jaxrl_llm/([\w/.]+)` \| `([\w.]+)`", DOCS.read_text(), re.M)
    assert chain == [(file, name.rpartition(".")[2]) for file, name in rows]
