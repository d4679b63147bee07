"""Check a release, and tag it with its text in CHANGELOG.md: python scripts/release.py [--tag]

The newest version of CHANGELOG.md is released: `## 0.2.0 (2027-01-31)`. It must have a date, and be
the version of the package and of CITATION.cff. With --tag the commit gets an annotated tag v0.2.0,
whose message is the section of the changelog. Nothing is pushed.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((.*)\)$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def newest(changelog: str) -> tuple[str, str, str]:
    """(version, date or "unreleased", text) of the first section of a version."""
    found = list(HEADING.finditer(changelog))
    if not found:
        raise ValueError("CHANGELOG.md has no heading such as '## 0.1.0 (2026-12-24)'")
    end = found[1].start() if len(found) > 1 else len(changelog)
    return found[0][1], found[0][2], changelog[found[0].end() : end].strip()


def versions(root: Path) -> dict[str, str]:
    """The version that each file names."""
    package = (root / "jaxrl_llm" / "__init__.py").read_text()
    citation = (root / "CITATION.cff").read_text()
    patterns = {
        "jaxrl_llm/__init__.py": (r'^__version__ = "(.*)"$', package),
        "CITATION.cff": (r"^version: (.*)$", citation),
    }
    found = {name: re.search(p, text, re.MULTILINE) for name, (p, text) in patterns.items()}
    return {name: match[1] if match else "none" for name, match in found.items()}


def faults(root: Path) -> list[str]:
    """What is not ready for a release; empty if all is."""
    version, date, _ = newest((root / "CHANGELOG.md").read_text())
    named = versions(root).items()
    wrong = [f"{file} has version {other}, not {version}" for file, other in named]
    wrong = [text for text, (_, other) in zip(wrong, named, strict=True) if other != version]
    if not DATE.fullmatch(date):
        wrong.append(f"CHANGELOG.md: version {version} has no date but '{date}'")
    if git(root, "tag", "--list", f"v{version}"):
        wrong.append(f"the tag v{version} exists")
    if git(root, "status", "--porcelain"):
        wrong.append("the tree has changes that are not committed")
    return wrong


def git(root: Path, *words: str, text: str = "") -> str:
    """The output of a git command."""
    done = subprocess.run(
        ["git", *words], cwd=root, input=text, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main(argv: list[str], root: Path = ROOT) -> int:
    """Say what is wrong, or make the tag."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tag", action="store_true", help="make the tag")
    flags = parser.parse_args(argv)
    version, _, text = newest((root / "CHANGELOG.md").read_text())
    for fault in (wrong := faults(root)):
        print(fault, file=sys.stderr)
    if wrong:
        return 1
    if flags.tag:
        message = f"jaxrl_llm {version}\n\n{text}\n"
        git(
            root, "tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--file=-", text=message
        )
        print(f"tagged v{version}; git push origin v{version} publishes it")
    else:
        print(f"{version} is ready: python scripts/release.py --tag")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
