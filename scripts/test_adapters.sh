#!/usr/bin/env bash
# Test the adapters of environments with the real packages, each in an environment of its own.
# Usage: scripts/test_adapters.sh [FOLDER], from the root of a clone.
set -euo pipefail
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
grep -v '^openai==' constraints.txt > "$folder/constraints.txt"  # verifiers needs one before 3
for package in reasoning-gym==0.1.25 textarena==0.7.4 skyrl-gym==0.4.0 verifiers==0.4.0; do
  name=${package%%==*}
  [ -d "$folder/$name" ] || python3 -m venv "$folder/$name"
  "$folder/$name/bin/pip" install --quiet "$package" pytest pytest-timeout pytest-xdist -e . \
    -c "$folder/constraints.txt"
  "$folder/$name/bin/python" -m pytest -n 0 tests/agents/test_adapters.py -k "${name//-/_}"
done
