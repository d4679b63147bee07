"""The planned iteration as compiled programs: how many there are, and what they donate."""

import warnings

import jax
import pytest
from tiny_iteration import first_states, open_iteration, run_step, tiny_config
from tiny_run import TinyRun

from jaxrl_llm.overrides import load_config
from jaxrl_llm.trainer import loop
from jaxrl_llm.trainer.guards import count_compilations
from jaxrl_llm.trainer.run import train


def is_deleted(tree) -> list[bool]:
    return [x.is_deleted() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("model_reward", "programs"), [(True, 1), (False, 3)])
def test_number_of_programs_and_donation(model_reward, programs):
    """A model reward gives one program; a Python reward splits it in three. Then no more.

    The states of learning roles are updated in place, those of frozen roles are left alone.
    """
    iteration = open_iteration(tiny_config(model_reward=model_reward))
    first = first_states(iteration)
    with count_compilations() as counter, warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        states, _, _ = run_step(iteration, first, 1)
    assert counter.programs("iteration") == counter.count == programs, counter.names
    with count_compilations() as counter:
        for step in range(2, 6):
            states, _, metrics = run_step(iteration, states, step)
    assert counter.count == 0, counter.names
    assert metrics["critic/score/max"] > metrics["critic/score/min"]
    for role in ("actor", "critic", "kl_controller"):
        assert all(is_deleted(first[role])), f"{role} was not donated"
        assert not any(is_deleted(states[role]))
    for role in first.keys() - {"actor", "critic", "kl_controller"}:
        assert not any(is_deleted(first[role])), f"{role} is frozen and was donated"


def test_a_run_compiles_nothing_after_its_first_steps(tmp_path, monkeypatch, capsys):
    """The whole loop: data, reward pool, validation and saving beside the programs."""
    run = TinyRun(tmp_path)
    overrides = {"run_dir": str(run.run_dir), "total_steps": "8", "warmup.steps": "2"}
    config = load_config(str(tmp_path / "tiny.py"), list(overrides.items()))
    one_step, counts = loop.Loop._one_step, []

    with count_compilations() as counter:

        def counted(self):
            counts.append(counter.count)  # what the step before, its validation and save compiled
            return one_step(self)

        monkeypatch.setattr(loop.Loop, "_one_step", counted)
        summary = train(config)
    assert summary.step == 8
    # Validation and saving were done once before the first step, so all is compiled after it.
    assert counts[1] > counts[0]
    assert counts[1:] == [counts[1]] * 7, (counts, counter.names)
    assert counter.count == counts[1]
