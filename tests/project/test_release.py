"""What a release needs: one version, metadata, a Dockerfile, and tags from the changelog."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from check_dockerfile import faults as docker_faults  # noqa: E402
from release import faults, git, main, newest, versions  # noqa: E402


def test_every_file_names_one_version():
    version, date, text = newest((ROOT / "CHANGELOG.md").read_text())
    assert set(versions(ROOT).values()) == {version}
    assert date and "### Added" in text


def test_the_metadata_name_the_licence_and_a_readme():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and (ROOT / project["license-files"][0]).exists()
    assert (ROOT / project["readme"]).exists() and project["authors"] and project["keywords"]
    assert not [line for line in project["classifiers"] if line.startswith("License ::")]


CHANGELOG = """# Changelog

## Versions
Words.

## 0.2.0 (2027-01-31)
The second.

### Added
- # one

## 0.1.0 (2026-12-24)
The first.
"""


@pytest.fixture
def released(tmp_path: Path) -> Path:
    (tmp_path / "jaxrl_llm").mkdir()
    (tmp_path / "jaxrl_llm" / "__init__.py").write_text('"""."""\n__version__ = "0.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    for words in (["init", "-q"], ["config", "user.name", "a"], ["config", "user.email", "a@b"]):
        git(tmp_path, *words)
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "a")


def test_a_release_is_tagged_with_its_section(released, capsys):
    assert main([], released) == 0 and git(released, "tag") == ""
    assert main(["--tag"], released) == 0
    said = git(released, "tag", "--list", "--format=%(contents)", "v0.2.0")
    assert said == "jaxrl_llm 0.2.0\n\nThe second.\n\n### Added\n- # one"
    assert main(["--tag"], released) == 1
    assert "the tag v0.2.0 exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("CHANGELOG.md", "2027-01-31", "unreleased", "has no date"),
        ("CITATION.cff", "0.2.0", "0.1.0", "CITATION.cff has version 0.1.0, not 0.2.0"),
        ("jaxrl_llm/__init__.py", "0.2.0", "0.3", "__init__.py has version 0.3, not 0.2.0"),
    ],
)
def test_what_is_not_ready_is_named(released, file, old, new, fault):
    path = released / file
    path.write_text(path.read_text().replace(old, new))
    assert faults(released)[-1] == "the tree has changes that are not committed"
    commit(released)
    (found,) = faults(released)
    assert fault in found


def test_the_dockerfile_has_no_fault():
    done = subprocess.run(
        [sys.executable, "scripts/check_dockerfile.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "Dockerfile: no fault\n")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("RUN true\nFROM a:1", "the first instruction must be FROM"),
        ("FROM a", "an image with a tag"),
        ("FROM a:1\nCOPIE a b", "COPIE: no such instruction"),
        ("FROM a:1\nCOPY pyproject.toml nothing ./", "COPY nothing: it does not exist"),
        ("FROM a:1\nCOPY docs ./", "COPY docs: .dockerignore leaves it out"),
        ("FROM a:1\nRUN if true; \\\n  then", "RUN if true; then: sh"),
        ("FROM a:1\nCMD [jaxrl]", "a JSON list of words"),
        ("FROM a:1\nUSER", "USER: nothing follows"),
    ],
)
def test_faults_of_a_dockerfile_are_found(text, fault):
    assert any(fault in found for found in docker_faults(text, ROOT))
