"""The benchmark of the server, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/benchmarks/serve.py"


@pytest.mark.nightly
def test_clients_are_answered_whole():
    words = ["--shape=tiny", "--clients=1,3", "--prompt=20", "--response=10", "--rounds=1"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, "--dtype=float32"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, *lines = map(json.loads, done.stdout.splitlines())
    assert first["shape"] == "tiny"
    assert [(x["clients"], x["requests"], x["output tokens"]) for x in lines] == [
        (1, 1, 10),
        (3, 3, 30),
    ]
    for line in lines:
        assert 0 < line["ms to the first token"]["median"] < line["ms a request"]["p99"]
    flag = subprocess.run([sys.executable, SCRIPT, "--shapes=a"], capture_output=True, text=True)
    assert "unknown flag --shapes=a" in flag.stderr and flag.returncode == 1
