"""Answers of several turns on meshes and in two processes: the samples of one device."""

import sys

import pytest
from tiny_run import REPOSITORY, TinyRun, assert_close
from trainer.test_conversing import TALKS, environment

pytestmark = pytest.mark.nightly

TRAIN = str(REPOSITORY / "scripts" / "train.py")
PROCESSES = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"]
FLAGS = (
    "--config.algorithm=grpo",
    "--config.warmup=null",
    "--config.reward.functions=[]",
    "--config.total_steps=2",
    "--config.data.max_response_length=12",
    "--config.data.train_batch_size=8",
    "--config.actor.hf_config.max_position_embeddings=32",
    "--config.checkpoint.best_metric=",
    "--config.validation.every=2",
)
TIMED = ("env_s/", "rollout/decode_steps")


def run_of(folder):
    folder.mkdir(parents=True)
    return TinyRun(folder, *FLAGS, f"--config.rollout.environment=[{environment(folder, TALKS)}]")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    run = run_of(tmp_path_factory.mktemp("one") / "run")
    run.finish_here()
    return run


def assert_same_samples(run, one):
    """The tokens of one device, and its metrics to rounding."""
    for step, row in one.metrics().items():
        mine, expected = (
            {name: x for name, x in metrics.items() if not name.startswith(TIMED)}
            for metrics in (run.metrics()[step], row)
        )
        assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    for kind in ("train", "validation"):
        samples, expected = run.samples(kind), one.samples(kind)
        assert samples.keys() == expected.keys() != set()
        for key, sample in expected.items():
            for name in ("tokens", "score"):
                assert samples[key][name] == sample[name], (kind, key, name)
            for name in ("messages", "stop_reason"):
                assert samples[key]["extras"][name] == sample["extras"][name]
            assert turns_of(samples[key]) == turns_of(sample)


def turns_of(sample):
    """The turns without their seconds."""
    turns = sample["extras"]["turns"]
    return [{name: x for name, x in turn.items() if name != "tool_s"} for turn in turns]


@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=str,
)
def test_a_mesh_gives_the_samples_of_one_device(tmp_path, one, sizes):
    run = run_of(tmp_path / "run")
    run.finish_here("--devices=8", *(f"--config.mesh.{axis}={n}" for axis, n in sizes.items()))
    assert_same_samples(run, one)


IN_GRAPH = (
    "--config.rollout.environment=maze",
    "--config.data.max_response_length=48",
    "--config.data.max_prompt_length=16",
    "--config.actor.hf_config.max_position_embeddings=64",
)


def test_turns_in_one_program_on_meshes(tmp_path):
    """Each device plays the games of its samples."""
    one = TinyRun(tmp_path / "one", *FLAGS, *IN_GRAPH)
    one.finish_here()
    assert any(len(x["extras"]["turns"]) > 1 for x in one.samples("train").values())
    for axis in ("data", "fsdp"):
        run = TinyRun(tmp_path / axis, *FLAGS, *IN_GRAPH)
        run.finish_here("--devices=8", f"--config.mesh.{axis}=8")
        assert_same_samples(run, one)


def test_two_processes_give_the_samples_of_one(tmp_path, one):
    """Each drives its own samples. Metrics of turns are over both."""
    run = run_of(tmp_path / "run")
    run.finish(launcher=[*PROCESSES, TRAIN])
    assert_same_samples(run, one)
    assert {p.name for p in (run.run_dir / "observations").iterdir()} == {"process0", "process1"}
    lines = [*(run.run_dir / "observations").glob("process1/step_2.jsonl")]
    assert lines and lines[0].stat().st_size


def test_heads_that_two_processes_share_are_refused_in_both(tmp_path):
    """One that went on would wait for the other."""
    run = run_of(tmp_path / "run")
    output = run.finish("--config.mesh.tensor=2", launcher=[*PROCESSES, TRAIN], code=2)
    assert output.count("config.mesh.generation.tensor over several processes") >= 2
