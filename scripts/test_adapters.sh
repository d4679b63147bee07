#!/usr/bin/env bash
# Test the adapters of environments, and agent libraries as programs, with the real packages. Each
# has an environment of its own.
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
smolagents="$folder/smolagents/bin" agents="$folder/openai-agents/bin"
[ -d "$folder/smolagents" ] || python3 -m venv "$folder/smolagents"
[ -d "$folder/openai-agents" ] || python3 -m venv "$folder/openai-agents"
"$smolagents/pip" install --quiet 'smolagents[openai]==1.26.0' pytest pytest-timeout pytest-xdist \
  -e '.[serve]' -c constraints.txt
"$agents/pip" install --quiet openai-agents==0.24.0
OPENAI_AGENTS_PYTHON="$agents/python" "$smolagents/python" -m pytest -n 0 \
  tests/server/test_agent_libraries.py
