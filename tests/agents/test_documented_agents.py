"""The examples of docs/agents.md and docs/add-an-environment.md do what the pages say."""

import re
from pathlib import Path

from agents.fake_engine import FakeEngine, sample_of

from jaxrl_llm.agents.setup import open_driver
from jaxrl_llm.config import load_config
from jaxrl_llm.tokenizer import CharTokenizer

ROOT = Path(__file__).resolve().parents[2]
CHAR = CharTokenizer()


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_the_environments_of_the_page(tmp_path, monkeypatch, capsys):
    """As files, as the page names them, and as objects of a program."""
    with_steps, with_methods, _, _, tried = blocks("add-an-environment.md")
    file = tmp_path / "my_environments.py"
    file.write_text(f"{with_steps}\n{with_methods}")
    monkeypatch.syspath_prepend(tmp_path)
    exec(tried, {})
    assert "Step(observation='0 are left.', reward=1.0, done=True" in capsys.readouterr().out
    keys = {
        "rollout.environment": f"{file}:Countdown",
        "rollout.environment.0.settings": "{start: 9}",
        "data.max_prompt_length": 100,
        "data.max_response_length": 400,
    }
    driver = open_driver(load_config("ppo", keys), CHAR, max_context=1000)
    engine = FakeEngine(CHAR, driver.stop_ids(plain=True))
    (done,) = driver.run(engine, [sample_of(CHAR, 0, "Go. ", ["3", "x", "3", "3"])])
    driver.close()
    assert CHAR.decode(done.prompt_ids) == "Go. 9 are left."
    assert (done.stop_reason, done.reward, len(done.turns)) == ("env_done", 1.0, 4)


def test_the_tool_of_the_page(tmp_path):
    (source,) = blocks("agents.md")
    file = tmp_path / "my_tools.py"
    file.write_text(source.partition("\n")[2])
    keys = {"rollout.tools": f"[{file}:weather, calculator]", "data.max_response_length": 400}
    driver = open_driver(load_config("ppo", keys | {"data.max_prompt_length": 100}), CHAR,
                         max_context=1000)  # fmt: skip
    call = '{"name": "weather", "arguments": {"city": "Lima"}}'
    engine = FakeEngine(CHAR, driver.stop_ids(plain=True))
    (done,) = driver.run(engine, [sample_of(CHAR, 0, "Weather?", [call, "21"])])
    driver.close()
    assert done.messages[1]["content"] == '\n{"city": "Lima", "degrees": 21}\n'
    assert done.stop_reason == "completed"
