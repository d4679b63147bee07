"""The Slurm script after the loss of a node, with programs in place of Slurm's."""

import os
import subprocess
from pathlib import Path

from tiny_run import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "slurm" / "train.sbatch"
SRUN = """#!/usr/bin/env bash
echo "srun ${JAXRL_FEWER_PROCESSES:-0} $*" >> "$LOG"
exit "$(sed -n "$(wc -l < "$LOG")p" "$CODES")"
"""
SINFO = """#!/usr/bin/env bash
cat "$STATES"
"""


def job(folder: Path, codes: list[int], states: str, **variables: str):
    """The script in a job of four nodes; srun ends with `codes`. The calls of srun, and the end."""
    for name, text in (("srun", SRUN), ("sinfo", SINFO)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    files = {"LOG": "", "CODES": "\n".join(map(str, codes)), "STATES": states}
    for name, text in files.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "JAXRL_RESTART_S": "0"}
    environment |= {name: str(folder / name) for name in files} | variables
    environment |= {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}
    environment |= {"SLURM_JOB_NAME": "tiny", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, cwd=folder, capture_output=True, text=True
    )
    return (folder / "LOG").read_text().splitlines(), ended


def test_the_run_goes_on_with_the_nodes_that_answer(tmp_path):
    """One is down, and a mesh of the three that are left does not divide the batch."""
    states = "n1 alloc\nn2 down*\nn3 alloc\nn4 alloc\n"
    calls, ended = job(tmp_path, [137, 76, 0], states, JAXRL_MIN_NODES="2")
    assert ended.returncode == 0, ended.stderr
    first, second, third = calls
    assert first.startswith("srun 0") and "--nodelist" not in first
    assert "srun 1" in second and "--nodes=3 --ntasks=3 --nodelist=n1,n3,n4 python" in second
    assert "--nodes=2 --ntasks=2 --nodelist=n1,n3 python" in third
    assert "restart 1 of 3" in ended.stdout and "goes on with 2" in ended.stdout


def test_a_crash_on_nodes_that_all_answer_starts_them_all_again(tmp_path):
    states = "n1 alloc\nn2 mix\nn3 drng\nn4 alloc\n"
    calls, ended = job(tmp_path, [1, 0], states, JAXRL_MIN_NODES="2")
    assert ended.returncode == 0 and calls[0] == calls[1]


def test_too_few_nodes_and_no_wish_to_go_on_with_fewer_end_the_job(tmp_path):
    states = "n1 alloc\nn2 down\nn3 down*\nn4 alloc*\n"
    calls, ended = job(tmp_path, [137, 0], states, JAXRL_MIN_NODES="2")
    assert ended.returncode == 137 and len(calls) == 1
    assert "1 nodes are left, and JAXRL_MIN_NODES=2" in ended.stdout
    calls, ended = job(tmp_path, [137, 0], states)
    assert ended.returncode == 0 and calls[0] == calls[1]
