"""The planned iteration as compiled programs: how many there are, what they donate, their times."""

import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_iteration import first_states, open_iteration, random_params, run_step, tiny_config
from tiny_run import TinyRun

from jaxrl_llm import config as c
from jaxrl_llm.config import load_config
from jaxrl_llm.distributed.mesh import make_mesh, num_replicas
from jaxrl_llm.distributed.multihost import make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.evaluation.evaluate import open_validator
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan import generating, stages
from jaxrl_llm.plan.dataflow import segments
from jaxrl_llm.program import ahead
from jaxrl_llm.program.counting import count_compilations
from jaxrl_llm.program.guards import OutOfMemory, memory_guard
from jaxrl_llm.program.program import Program
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import HOST, Stage, StageOutput
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.trainer.training import Training
from jaxrl_llm.types import INPUT_FIELDS, RolloutBatch


def is_deleted(tree) -> list[bool]:
    return [x.is_deleted() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("model_reward", "programs"), [pytest.param(True, 1, marks=pytest.mark.slow), (False, 3)]
)
def test_number_of_programs_and_donation(model_reward, programs):
    """A model reward gives one program; a Python reward splits it in three. Then no more.

    A run finds the programs that were compiled ahead of it. The states of learning roles are
    updated in place, weights of frozen roles are left alone.
    """
    iteration = open_iteration(tiny_config(model_reward=model_reward))
    first = first_states(iteration)
    with count_compilations() as counter, warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        iteration.compile_ahead()
        iteration.program.wait_for_compilers()
        assert counter.programs("iteration") == counter.count == programs, counter.names
        states, _, _ = run_step(iteration, first, 1)
    assert counter.count == programs, counter.names
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


@pytest.mark.slow
def test_a_run_compiles_nothing_after_its_first_steps(tmp_path, monkeypatch, capsys):
    """The whole loop: data, reward pool, validation and saving as well as the programs."""
    run = TinyRun(tmp_path)
    overrides = {"run_dir": str(run.run_dir), "total_steps": "8", "warmup.steps": "2"}
    config = load_config(str(tmp_path / "tiny.py"), list(overrides.items()))
    begin_step, counts = Training.begin_step, []
    update, traced = stages.Update.__call__, []

    def traced_update(self, *arguments, **fields):
        traced.append(self.name)
        return update(self, *arguments, **fields)

    monkeypatch.setattr(stages.Update, "__call__", traced_update)

    with count_compilations() as counter:

        def counted(self):
            if self.listeners:  # a step of the run, not of its warm-up
                # What the step before, its validation and save compiled.
                counts.append(counter.count)
            return begin_step(self)

        monkeypatch.setattr(Training, "begin_step", counted)
        summary = train(config)
    assert summary.step == 8
    # Validation and saving were done once before the first step, so all is compiled after it.
    assert counter.programs("iteration") == 3
    assert counts[1] >= 3
    assert counts[1:] == [counts[1]] * 7, (counts, counter.names)
    assert counter.count == counts[1]
    # The plan is traced before the weights are made, and that is the only time.
    assert sorted(traced) == ["update_actor", "update_critic", "update_sft"]


@dataclass(frozen=True, kw_only=True, eq=False)
class OfOneField(Stage):
    """A stage that computes one field from another by `fn(step, field)`."""

    name: str
    given: tuple[str, ...]
    writes: tuple[str, ...]
    role: str = "device"
    fn: Callable[..., Any]
    compiler_options: Any = ()

    @property
    def reads(self):
        return self.given

    def __call__(self, state, step, **fields):
        (x,) = fields.values()
        return StageOutput({self.writes[0]: self.fn(step, x)})


@dataclass(frozen=True, kw_only=True, eq=False)
class Reports(OfOneField):
    """It reports the mean of its field under a name that others have too."""

    def __call__(self, state, step, **fields):
        output = super().__call__(state, step, **fields)
        return replace(output, metrics={"score": output.writes[self.writes[0]].mean()})


def device_stage(name: str, reads: str, writes: str) -> Stage:
    """Work that takes some 0.1 s, and is so much of it that it is not done inside the dispatch."""

    def fn(step, x):
        hard = jnp.outer(jnp.linspace(0.0, 1.0, 300), x[0] + jnp.ones(300))
        hard = jax.lax.fori_loop(0, 150, lambda _, y: jnp.tanh(y @ y.T / 300), hard)
        return x + hard.sum()

    return OfOneField(name=name, fn=fn, given=(reads,), writes=(writes,))


def host_stage(reads: str, writes: str) -> Stage:
    def fn(step, x):
        time.sleep(0.1)
        return x

    return OfOneField(name="reward", fn=fn, given=(reads,), writes=(writes,), role=HOST)


@pytest.mark.parametrize(
    ("fuse", "of_both", "taken"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
def test_a_program_has_the_compiler_options_that_all_its_stages_have(fuse, of_both, taken):
    options = {"xla_no_such_option": True}
    first = device_stage("first", "prompt_lengths", "function_scores")
    side = device_stage("side", "function_scores", "model_scores")
    planned = [
        replace(first, compiler_options=options),
        replace(side, compiler_options=options if of_both else {}),
    ]
    mesh = make_mesh(devices=jax.devices()[:1])
    program = Program(segments(planned, fuse=fuse), mesh=mesh, state_shardings={})
    fields: dict[str, Any] = dict.fromkeys(INPUT_FIELDS, np.ones(4, np.float32))
    batch = make_global(RolloutBatch(**fields), batch_sharding(mesh))
    with pytest.raises(Exception, match="xla_no_such_option") if taken else nullcontext():
        program.run({}, batch, 1, None, Timer())


def test_what_is_traced_or_lowered_ahead_is_not_traced_again():
    traced = []

    def counted(name, reads, writes):
        def fn(step, x):
            traced.append(name)
            return x + step

        return OfOneField(name=name, fn=fn, given=(reads,), writes=(writes,))

    first = counted("first", "prompt_lengths", "function_scores")
    last = counted("last", "scores", "greedy_scores")
    planned = [first, host_stage("function_scores", "scores"), last]
    mesh = make_mesh(devices=jax.devices()[:1])
    program = Program(segments(planned), mesh=mesh, state_shardings={})
    fields: dict[str, Any] = dict.fromkeys(INPUT_FIELDS, np.ones(4, np.float32))
    batch = make_global(RolloutBatch(**fields), batch_sharding(mesh))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
    )
    whole = program.trace({}, abstract)
    for segment in program.segments:
        if not segment.is_host:
            program.lower(segment, {}, whole)
    _, found, _ = program.run({}, batch, 1, None, Timer())
    np.testing.assert_array_equal(found.greedy_scores, np.full(4, 3.0))
    assert traced == ["first", "last"]


def test_the_first_program_is_compiled_while_the_next_one_is_traced(monkeypatch):
    compiled, seen = threading.Event(), []

    def compile_one(program, found, lowered, stored):
        lowered.compile()
        seen.append("compiled")
        compiled.set()

    def fn(step, x):
        seen.append("traced")
        assert compiled.wait(20)
        return x

    monkeypatch.setattr(ahead, "_compile", compile_one)
    first = device_stage("first", "prompt_lengths", "function_scores")
    last = OfOneField(name="last", fn=fn, given=("scores",), writes=("greedy_scores",))
    program = Program(
        segments([first, host_stage("function_scores", "scores"), last]),
        mesh=make_mesh(devices=jax.devices()[:1]),
        state_shardings={},
    )
    rows = jax.ShapeDtypeStruct((4,), np.float32)
    batch = RolloutBatch(**dict.fromkeys(INPUT_FIELDS, rows))
    program.trace({}, batch, compiles_first=True)
    program.compile_ahead({}, batch)
    program.wait_for_compilers()
    assert sorted(seen) == ["compiled", "compiled", "traced"]


@pytest.mark.parametrize("fuse", [False, True])
def test_two_stages_do_not_report_one_metric(fuse):
    """The second one would replace the first."""

    def reports(name, reads, writes):
        return Reports(name=name, given=(reads,), writes=(writes,), fn=lambda step, x: x)

    planned = [
        reports("first", "prompt_lengths", "function_scores"),
        reports("mine", "function_scores", "model_scores"),
    ]
    mesh = make_mesh(devices=jax.devices()[:1])
    program = Program(segments(planned, fuse=fuse), mesh=mesh, state_shardings={})
    fields: dict[str, Any] = dict.fromkeys(INPUT_FIELDS, np.ones(4, np.float32))
    batch = make_global(RolloutBatch(**fields), batch_sharding(mesh))
    with pytest.raises(ValueError, match="two stages report the metric 'score'.*rename that"):
        program.run({}, batch, 1, None, Timer())


# A program that takes a minute to compile, and an error while its thread is at work.
FAILS = """
import time
import jax, numpy as np
from test_program import INPUT_FIELDS, Program, RolloutBatch, device_stage, make_mesh, segments
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.main import run
from jaxrl_llm.program import ahead

def main(_):
    ahead._compile = lambda *_: time.sleep(60)
    one = Program(
        segments([device_stage("first", "prompt_lengths", "function_scores")]),
        mesh=make_mesh(devices=jax.devices()[:1]),
        state_shardings={},
    )
    rows = jax.ShapeDtypeStruct((4,), np.float32)
    one.compile_ahead({}, RolloutBatch(**dict.fromkeys(INPUT_FIELDS, rows)))
    raise ERROR("no such weights")

run(main, [])
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [("RuntimeError", 1), pytest.param("ConfigError", 2, marks=pytest.mark.slow)],
)
def test_an_error_does_not_wait_for_programs_that_are_compiled_ahead(error, code):
    source = FAILS.replace("ERROR", error)
    found = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert found.returncode == code, found.stderr
    last = {1: "RuntimeError: no such weights", 2: "error: no such weights"}[code]
    assert found.stderr.strip().splitlines()[-1] == last


def test_out_of_memory_names_the_program():
    def fn(step, field):
        return jnp.broadcast_to(field[:, None], (4, 2**48))

    stage = OfOneField(name="gen", fn=fn, given=("old_logprobs",), writes=("values",))
    mesh = make_mesh(devices=jax.devices()[:1])
    program = Program(segments([stage], fuse=True), mesh=mesh, state_shardings={})
    fields: dict[str, Any] = dict.fromkeys(INPUT_FIELDS, np.ones(4, np.float32))
    batch = RolloutBatch(**fields).replace(old_logprobs=np.ones(4, np.float32))
    batch = make_global(batch, batch_sharding(mesh))
    with pytest.raises(OutOfMemory, match="^gen does not fit"):
        program.run({}, batch, 1, None, Timer())


def test_out_of_memory_names_the_validation(monkeypatch):
    def too_much(*arguments, **settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 51.24GiB")

    monkeypatch.setattr(evaluate, "generate_on_mesh", too_much)
    config, role = tiny_config(), open_iteration(tiny_config()).roles["actor"]
    config = replace(config, data=replace(config.data, val_tasks=(c.ChainSum(size=4),)))
    with ExitStack() as stack:
        validator = open_validator(config, role, load_tokenizer("char"), None, stack)
        params = make_global(random_params(role.spec.params, 0), role.param_shardings)
        with pytest.raises(OutOfMemory, match="^validation does not fit(.|\n)*val_batch_size"):
            validator.run(params, 0)


class Named(Stage):
    """A stage that is named only."""

    def __init__(self, name, *, generates=False, updates=False):
        self.name, self.generates, self.updates = name, generates, updates


GREEDY = [Named("gen", generates=True), Named("gen_max", generates=True)]


@pytest.mark.parametrize(
    ("of_program", "remedies"),
    [
        (GREEDY, ["cache_tokens", "quantization", "mesh.fsdp"]),
        (None, ["cache_tokens.*val_batch_size", "mesh.fsdp"]),
        ([Named("old_log_prob")], ["micro_batch_tokens", "mesh.fsdp"]),
        (
            [Named("update_actor", updates=True)],
            ["remat", "micro_batch_tokens", "moment_dtype", "mesh.fsdp"],
        ),
    ],
)
def test_out_of_memory_says_what_needs_less(of_program, remedies):
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 51.24GiB\nat length"
    name, needs_less = "validation", evaluate.NEEDS_LESS_MEMORY
    if of_program is not None:
        segment = Segment(stages=tuple(of_program))
        name, needs_less = segment.name, segment.needs_less_memory
    matching = re.escape(name) + " does not fit.*51.24GiB"
    with pytest.raises(OutOfMemory, match=matching) as raised, memory_guard(name, needs_less):
        raise jax.errors.JaxRuntimeError(message)
    found = str(raised.value).partition("cheapest first: ")[2].partition("\n")[0].split("; ")
    assert len(found) == len(remedies)
    assert all(re.search(remedy, text) for remedy, text in zip(remedies, found, strict=True))
    assert "at length" not in str(raised.value)


def test_other_errors_of_a_program_are_left_alone():
    for message in ("INTERNAL: broken", "RESOURCE_EXHAUSTED: Shared memory size limit exceeded"):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message), memory_guard("gen", ()):
            raise jax.errors.JaxRuntimeError(message)


def test_a_state_takes_its_parameters_over():
    """No second copy: what it leaves behind would split the memory."""
    role = open_iteration(tiny_config()).roles["actor"]
    params = make_global(random_params(role.spec.params, 0), role.param_shardings)
    params = jax.tree.map(jnp.copy, params)  # memory that belongs to the device
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
    state = role.state(params)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.params)] == places
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_generation_has_options_for_its_samples_of_a_replica(monkeypatch):
    monkeypatch.setattr(generating, "compiler_options", lambda *numbers: {"asked": numbers})
    config = tiny_config()
    iteration = open_iteration(config)
    found = {stage.name: stage.compiler_options for stage in iteration.stages}
    samples = config.data.train_batch_size * config.rollout.n // num_replicas(iteration.mesh)
    assert found.pop("gen") == {"asked": (samples, config.rollout.num_slots)}
    assert not any(found.values())  # of all others
    remax = c.ReMax()
    planned = open_iteration(replace(config, algorithm=remax)).stages
    both = {s.name: s.compiler_options for s in planned if s.name in ("gen", "gen_max")}
    assert both["gen"] == both["gen_max"] == {"asked": (samples, config.rollout.num_slots)}


@pytest.mark.parametrize("fuse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_clocks_of_device_segments_do_not_overlap(fuse):
    """Disjoint times within a step add up to no more than the step.

    Not fused, the host's is disjoint as well. Fused, the device works while the host does.
    """
    first = device_stage("first", "prompt_lengths", "function_scores")
    side = device_stage("side", "function_scores", "model_scores")
    also = device_stage("also", "model_scores", "greedy_function_scores")
    last = device_stage("last", "scores", "greedy_scores")
    planned = [first, side, also, host_stage("function_scores", "scores"), last]
    parts = segments(planned, fuse=fuse)
    names = [part.name for part in parts]
    assert names == (
        ["first", "side+also", "reward", "last"] if fuse else [s.name for s in planned]
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    program = Program(parts, mesh=mesh, state_shardings={}, overlap=fuse)
    rows = np.ones(4, np.float32)
    fields: dict[str, Any] = dict.fromkeys(INPUT_FIELDS, rows)
    batch = make_global(RolloutBatch(**fields), batch_sharding(mesh))
    for step in (1, 2):  # the first one compiles, which would hide the rest
        timer = Timer()
        start = time.perf_counter()
        _, found, _ = program.run({}, batch, step, None, timer)
        jax.block_until_ready(found)
        elapsed = time.perf_counter() - start
    seconds = timer.timings()
    assert set(seconds) == set(names)
    assert min(seconds.values()) > 0.01, seconds
    if fuse:  # that program began before the host and is waited for after it
        assert seconds["side+also"] > seconds.pop("reward")
    assert sum(seconds.values()) <= elapsed, (seconds, elapsed)
