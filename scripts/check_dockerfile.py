"""Check the syntax of Dockerfile without Docker: python scripts/check_dockerfile.py

It checks instructions, that copied files exist and reach the build, and the shell of RUN lines.
"""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KNOWN = "ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM LABEL RUN SHELL USER VOLUME WORKDIR".split()


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each line, where a backslash continues a line."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.partition(" ") for line in whole.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in pairs]


def faults(text: str, root: Path) -> list[str]:
    """What Docker would refuse; empty if nothing."""
    found = instructions(text)
    words = [word for word, _ in found]
    wrong = [f"{word}: no such instruction" for word in words if word not in KNOWN]
    if [word for word in words if word != "ARG"][:1] != ["FROM"]:
        wrong.append("the first instruction must be FROM")
    ignored = (root / ".dockerignore").read_text().splitlines()
    for word, rest in found:
        if not rest:
            wrong.append(f"{word}: nothing follows")
        elif word == "FROM" and not re.fullmatch(r"[\w./-]+:[\w.-]+( AS \w+)?", rest):
            wrong.append(f"FROM {rest}: an image with a tag is expected")
        elif word in ("COPY", "ADD"):
            wrong += [fault for name in rest.split()[:-1] for fault in copied(name, root, ignored)]
        elif word == "RUN":
            done = subprocess.run(["sh", "-n"], input=rest, capture_output=True, text=True)
            wrong += [f"RUN {rest}: {done.stderr.strip()}"] * bool(done.returncode)
        elif word in ("ENTRYPOINT", "CMD"):
            wrong += [] if is_words(rest) else [f"{word} {rest}: a JSON list of words is expected"]
    return wrong


def copied(name: str, root: Path, ignored: list[str]) -> list[str]:
    """Why a file or folder would not be copied: the last pattern that fits decides."""
    kept = True
    for pattern in ignored:
        if fnmatch(name, pattern.removeprefix("!")):
            kept = pattern.startswith("!")
    wrong = [] if (root / name).exists() else [f"COPY {name}: it does not exist"]
    return wrong if kept else [*wrong, f"COPY {name}: .dockerignore leaves it out"]


def is_words(text: str) -> bool:
    """True for the JSON form of a command."""
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


if __name__ == "__main__":
    wrong = faults((ROOT / "Dockerfile").read_text(), ROOT)
    print("\n".join(wrong) or "Dockerfile: no fault")
    sys.exit(bool(wrong))
