"""Places that a command writes to are checked before its work."""

import pytest

import jaxrl_llm as rl
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch import commands, outputs
from jaxrl_llm.whole_files import write_whole


def test_a_full_disk_leaves_what_a_file_held(tmp_path, monkeypatch):
    file, link = tmp_path / "report.json", tmp_path / "link.json"
    file.write_text("earlier")
    link.symlink_to(file)

    def full(path, text, **_):
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(outputs.Path, "write_text", full)
        write_whole(link, "later")
    assert file.read_text() == "earlier" and sorted(tmp_path.iterdir()) == [link, file]
    write_whole(link, "later")
    assert file.read_text() == "later" and link.is_symlink()


def test_folders_are_made_and_a_folder_is_not_a_file(tmp_path):
    outputs.check_file("--json", tmp_path / "new" / "plan.json")
    outputs.check_folder("--output", tmp_path / "new" / "inner")
    assert (tmp_path / "new" / "inner").is_dir()
    with pytest.raises(ConfigError, match="--json=.*new is a folder; give a file such as"):
        outputs.check_file("--json", tmp_path / "new")


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "data", "gsm8k", "--output={0}/new"],
        ["prepare", "upcycle", "--model={1}", "--experts=2", "--output={0}/new"],
        ["plan", "--config=ppo", "--quick", "--json={0}/plan.json"],
        ["doctor", "--folder={0}/new"],
    ],
)
@pytest.mark.parametrize("folder", ["/proc", "/dev/null"])
def test_a_folder_that_takes_no_files_is_refused_before_the_work(tmp_path, words, folder):
    """Root may write in /proc by its permissions, and every file of it fails."""
    name, *flags = [word.format(folder, tmp_path) for word in words]
    with pytest.raises(ConfigError, match=f"files cannot be made in {folder}.*give another fold"):
        commands.COMMANDS[name](flags)


def test_an_evaluation_is_refused_before_its_model_is_opened(tmp_path):
    (tmp_path / "file").touch()
    for name in ("output", "answers"):
        with pytest.raises(ConfigError, match=f"--{name}: files cannot be made in .*file"):
            rl.evaluate("owner/name", "ppo", **{name: tmp_path / "file" / "eval.json"})
