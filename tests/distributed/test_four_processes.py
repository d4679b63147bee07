"""Four processes give the metrics and the trace of one, also where several hold one sample."""

import sys
from pathlib import Path

import pytest
from tiny_run import REPOSITORY, TinyRun, assert_close

PROCESSES = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=4", "--"]
TRAIN = str(REPOSITORY / "scripts" / "train.py")
SHORT = (
    "--config.total_steps=3",
    "--config.warmup.steps=2",
    "--config.save_every=3",
)
FILTERED = (
    "--config.algorithm=dapo",
    "--config.algorithm.use_kl_in_reward=false",
    "--config.rollout.filter_groups.enable=true",
    "--config.rollout.filter_groups.max_num_gen_batches=3",
    "--config.rollout.filter_groups.shortage=fill",
)
# Eight samples of each of two prompts: two processes share each group.
CUT = (
    "--config.algorithm=remax",
    "--config.rollout.n=8",
    "--config.data.train_batch_size=2",
    "--config.actor.ppo_mini_batch_size=2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "mesh"),
    [
        ((), {"data": 2, "tensor": 2}),
        (FILTERED, {"fsdp": 2, "tensor": 2}),
        (CUT, {"data": 4}),
    ],
    ids=["ppo", "dynamic sampling", "remax, cut groups"],
)
def test_four_processes_run_as_one(flags: tuple, mesh: dict[str, int], tmp_path: Path) -> None:
    one = TinyRun(tmp_path / "one", *SHORT, *flags)
    four = TinyRun(tmp_path / "four", *SHORT, *flags)
    one.finish()
    sizes = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
    four.finish(*sizes, launcher=[*PROCESSES, TRAIN])
    expected, found = one.metrics(), four.metrics()
    assert list(found) == list(expected) == [0, 1, 2, 3]
    for step, row in expected.items():
        assert_close(found[step], row, rtol=1e-5, atol=2e-6)
    for kind in ("train", "validation"):
        samples = four.samples(kind)
        assert samples.keys() == one.samples(kind).keys()
        for key, sample in one.samples(kind).items():
            for name in ("prompt", "row", "tokens", "score", "parts", "finished"):
                assert samples[key][name] == sample[name], (kind, key, name)
