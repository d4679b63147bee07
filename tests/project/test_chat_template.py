"""A chat template may be anything: what takes too long or too much memory is refused."""

import resource
import time

import pytest
from chat_tokenizer import write_chat_tokenizer

from jaxrl_llm import chat_template
from jaxrl_llm.chat_template import try_template
from jaxrl_llm.tokenizer import HFTokenizer

MESSAGES = {"messages": [{"role": "user", "content": "2+3="}]}
LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    with pytest.raises(ValueError, match="more than 1 s of computing"):
        try_template(LONG, MESSAGES)


def test_a_busy_machine_has_more_time_by_the_clock_than_a_template_has(monkeypatch):
    """A process that computes for 1 s may wait for others many times as long."""
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    monkeypatch.setattr(chat_template, "_TRIAL", "import time; time.sleep(5)")
    try_template("{{ messages }}", MESSAGES)
    monkeypatch.setattr(chat_template, "PATIENCE", 1)
    with pytest.raises(ValueError, match="did not end within 1 s"):
        try_template("{{ messages }}", MESSAGES)


def test_a_template_that_writes_a_text_without_end_is_refused():
    """It fits into the memory of the trial, but a tokenizer would need many times as much."""
    with pytest.raises(ValueError, match="more than 10,000,000 characters"):
        try_template("{{ 'a' * 90000000 }}", MESSAGES)


def test_a_trial_that_cannot_run_is_no_permission(monkeypatch):
    monkeypatch.setattr(chat_template, "_TRIAL", "import no_such_module")
    with pytest.raises(ValueError, match="ended with code 1"):
        try_template("{{ messages }}", MESSAGES)


def test_a_tokenizer_tries_its_template_once_whatever_the_number_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 1)
    tokenizer = HFTokenizer(write_chat_tokenizer(tmp_path, template=LONG))
    started = time.process_time() + children_time()
    for _ in range(20):
        with pytest.raises(ValueError, match="refuses the conversation: it takes more than 1 s"):
            tokenizer.apply_chat_template(MESSAGES["messages"])
    assert time.process_time() + children_time() - started < 4


def children_time() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


@pytest.mark.parametrize("large", ["{{ 'x' * 2000000000 }}", "{% set x = [0] * 500000000 %}"])
def test_a_template_that_takes_all_memory_is_refused(large):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="more than 1 GiB of memory"):
        try_template({"default": large}, MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
        "{{ raise_exception('no system message') }}",  # its own rendering says so
        "{% include 'other' %}",
        "{% for %}",
    ],
)
def test_other_templates_are_left_to_their_rendering(template):
    try_template(template, MESSAGES)


def test_a_later_text_is_limited_too(tmp_path):
    """The tokenizer would end the process without a word."""
    template = "{% if messages | length > 1 %}{{ 'x' * 90000000 }}{% endif %}x"
    tokenizer = HFTokenizer(write_chat_tokenizer(tmp_path, template=template))
    assert tokenizer.apply_chat_template(MESSAGES["messages"]) == "x"
    with pytest.raises(ValueError, match="refuses the conversation: it writes more than 10,000,0"):
        tokenizer.apply_chat_template(MESSAGES["messages"] * 2)
