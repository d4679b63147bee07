"""The page in a real browser: clicks, no console errors, no script of a model that runs.

Needs Chromium (the package `chromium` of a distribution); without one the tests are skipped.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from written_run import A_STEP, ATTACKS, STEPS, lines, talk, write_run

from jaxrl_llm.report.html import write_page
from jaxrl_llm.report.run_files import open_runs

playwright = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), "")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # A container's root has no namespaces for the browser's own sandbox.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "first"), write_run(folder / "second", 3e-4)]
    return write_page(open_runs(runs), folder / "report.html").as_uri()


@contextmanager
def opened(browser: Any, file: str) -> Iterator[Any]:
    """The page, freshly opened. At the end: nothing went wrong in it, and no attack ran."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(10_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text))
    page.on("request", lambda asked: wrong.extend([asked.url] * (asked.url != file)))
    page.goto(file)
    yield page
    assert page.evaluate("window.pwned") is None
    assert wrong == []
    page.close()


@pytest.fixture
def page(browser, file) -> Iterator[Any]:
    with opened(browser, file) as page:
        yield page


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def test_curves_are_read_under_the_pointer_and_zoomed(page):
    chart = page.locator(".chart", has_text="critic/score/mean").first
    assert "first 1 (step 30)" in chart.inner_text()
    box = chart.locator("canvas").bounding_box()
    left, right = box["x"] + 52, box["x"] + box["width"] - 10

    def at(share: float) -> None:
        page.mouse.move(left + share * (right - left), box["y"] + 60)

    at(0.0)
    assert "first 0.03333 (step 1)" in chart.inner_text()
    at(0.5)
    page.mouse.down()
    at(0.25)
    page.mouse.up()
    at(1.0)
    shown = chart.inner_text()
    assert "(step 15)" in shown or "(step 16)" in shown  # the middle is now the right end
    page.mouse.dblclick(left + 20, box["y"] + 60)
    at(1.0)
    assert "(step 30)" in chart.inner_text()
    at((7 - 1) / 29)
    assert "alarm entropy" in chart.inner_text()


def test_runs_are_a_table_that_is_sorted(page):
    rows = page.locator("#leaders tbody tr")
    first = ["first", "0.001", "30 of 31", "0.25", "0.875", "20", "0.75", "3.6", "115.5"]
    assert rows.all_inner_texts() == ["\t".join(first), "\t".join(["second", "0.0003", *first[2:]])]
    assert "share of right answers to held-out prompts" in page.locator("main").inner_text()
    heading = page.get_by_role("columnheader", name="actor.learning_rate")
    heading.get_by_role("button").click()
    assert rows.first.inner_text().startswith("second") and "▲" in heading.inner_text()
    heading.get_by_role("button").click()
    assert rows.first.inner_text().startswith("first") and "▼" in heading.inner_text()
    page.get_by_label("metric").select_option("warmup: loss")
    assert rows.first.inner_text().split("\t")[3:7] == ["1", "0.25", "4", "0.25"]
    assert "lowest" in page.locator("#leaders thead").inner_text()


def test_equal_curves_are_one_chart_and_a_constant_has_none(page):
    tab(page, "Curves")
    titles = page.locator(".chart h3").all_inner_texts()
    assert "critic/rewards/mean" in titles and "critic/score/mean" not in titles
    chart = page.locator(".chart", has_text="critic/rewards/mean")
    assert "The same values: critic/score/mean." in chart.inner_text()
    assert "the same minus the KL penalty, summed over tokens" in chart.inner_text()
    assert "perf/max_memory_allocated_gb" not in titles
    row = page.locator(".constants tbody tr", has_text="perf/max_memory_allocated_gb")
    assert row.inner_text().split("\t")[1:3] == ["10", "10"]


def test_a_step_that_compiles_does_not_set_the_scale(page):
    """Of times 97, 1, 2, ..., 9, the axis has 1 to 9; of a score it has all."""
    scale = """([name, view]) => { const steps = [...Array(10).keys()];
        const values = [97, ...steps.slice(1)];
        const chart = new Chart(Object.assign(new View(), view), name,
          [{ name, steps, values, skip: name === 'time' ? new Set([0]) : null }]);
        chart.measure(chart.lines()); return [chart.y0, chart.y1]; }"""
    low, high = page.evaluate(scale, ["time", {}])
    assert 0 < low < 1 and 9 < high < 10
    assert page.evaluate(scale, ["score", {}])[1] > 97
    assert page.evaluate(scale, ["time", {"logarithmic": True}])[1] < 1.1  # log10


def test_sparse_curves_are_not_smoothed(page):
    lines = """(sparse) => new Chart(Object.assign(new View(), { smoothing: 0.9 }), "x",
        [{ steps: [1, 2, 3], values: [0, 1, 0], sparse }]).lines().map((line) => line.values)"""
    assert page.evaluate(lines, True) == [[0, 1, 0]]
    raw, smooth = page.evaluate(lines, False)
    assert raw == [0, 1, 0] and 0 < smooth[2] < 1
    sparse = """(name) => {
        const curves = { often: { of: 100 }, seldom: { of: 40 }, "w: x": { of: 13 } };
        return isSparse({ curves }, name); }"""
    assert [page.evaluate(sparse, n) for n in ("often", "seldom", "w: x")] == [False, True, False]


def test_charts_are_drawn(page):
    tab(page, "Curves")
    page.get_by_label("Search metrics").fill("timing_s/gen")
    assert page.locator(".chart").count() == 1
    page.wait_for_function("document.querySelector('.readout').textContent.includes('step')")
    inked = """() => { const c = document.querySelector('canvas');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; }"""
    assert page.evaluate(inked) > 500


def test_runs_are_hidden_and_stages_compared(page):
    tab(page, "Times and memory")
    rows = page.locator("main table tbody tr")
    assert rows.first.inner_text().split() == ["gen", "1", "25", "%", "1", "25", "%"]  # medians
    page.get_by_role("button", name="second").click()
    assert rows.first.inner_text().split() == ["gen", "1", "25", "%"]


def test_samples_are_filtered_and_searched(page):
    tab(page, "Samples")
    page.get_by_role("button", name="second").click()
    number = page.locator("main .note", has_text=" samples").last
    assert number.inner_text() == f"{STEPS * A_STEP + 4} samples"
    page.get_by_label("kind").select_option("validation")
    assert number.inner_text() == "4 samples"
    page.get_by_label("kind").select_option("train")
    page.get_by_label("source").select_option("sums")
    page.get_by_label("score from").fill("1")
    assert number.inner_text() == f"{STEPS * A_STEP // 2} samples"
    page.get_by_label("Search prompts").fill("WHAT IS 30+3")
    assert number.inner_text() == "1 samples"
    response = page.locator(".samples tbody td.text").nth(1)
    assert ATTACKS[3][2:9] in response.inner_text() and ATTACKS[0] not in response.inner_text()
    page.get_by_label("Search prompts").fill("onerror=")
    assert ATTACKS[1] in page.locator(".samples tbody td.text").nth(1).inner_text()


def test_one_sample_is_seen_token_by_token(page):
    tab(page, "Samples")
    page.get_by_label("Search prompts").fill("30+0")
    row = page.locator(".samples tbody tr").first
    assert row.locator("td.short").all_inner_texts() == ["30", ATTACKS[0]]  # truth and reason
    row.click()
    assert row.get_attribute("class") == "open"
    sample = row.locator("+ tr #sample")  # where one has clicked
    assert "Ground truth\n30" in sample.inner_text() and ATTACKS[0] in sample.inner_text()
    tokens = sample.locator(".token")
    assert tokens.all_inner_texts() == ["answer", " 31 ", "<b>bold</b>", ATTACKS[0]]
    tokens.nth(3).click()
    said = page.locator("#token").inner_text()
    assert "probability 0.6065, advantage 0.75, ratio 2, surprise 0.5" in said
    colours = "(spans) => spans.map((span) => span.style.background)"
    before = tokens.evaluate_all(colours)
    assert len(set(before)) == 4
    sample.get_by_label("colour").select_option("ratio")
    assert tokens.evaluate_all(colours)[:3] == [tokens.evaluate_all(colours)[0]] * 3
    assert tokens.evaluate_all(colours) != before
    sample.get_by_role("button", name="Close").click()
    assert page.locator("#sample").count() == 0 and row.get_attribute("class") == ""
    row.press("Enter")
    page.locator(".samples tbody > tr").nth(2).click()  # below the open one
    assert page.locator("#sample").count() == 1
    assert "what is 30+0?" in page.locator("#sample").inner_text()  # the first run's, too


def test_a_sample_of_several_turns_is_seen_as_a_conversation(browser, tmp_path):
    run = write_run(tmp_path / "turns")
    (run / "trace" / "train-00000000.jsonl").write_text(lines([talk(1, 0)]))
    file = write_page(open_runs([run]), tmp_path / "report.html").as_uri()
    with opened(browser, file) as page:
        tab(page, "Samples")
        page.get_by_label("kind").select_option("train")
        page.get_by_label("Search prompts").fill("bern")
        page.locator(".samples tbody tr").first.click()
        sample = page.locator("#sample")
        summary = "2 turns; stop reason completed; 0.25 s of tools; turn rewards 0.5"
        assert summary in sample.inner_text()
        messages = [text.split("\n") for text in sample.locator(".message").all_inner_texts()]
        assert messages == [
            ["user prompt", "How warm?"],
            [
                "assistant turn 1, sampled, 2 tokens, 1 call failed",
                "I look it up.",
                'weather({"town": "Bern"}) wrong_arguments',
            ],
            ["tool weather, observed, not in the loss, 1 token, 0.25 s", ATTACKS[0]],
            ["assistant turn 2, sampled, 1 token, reward 0.5", "21 degrees"],
        ]
        tokens = sample.locator(".token")
        tokens.nth(2).click()
        assert page.locator("#token").inner_text().endswith(": observed, not in the loss")
        tokens.nth(3).click()
        assert "ratio 2" in page.locator("#token").inner_text()
        facts = sample.locator("table tbody tr").all_inner_texts()
        assert facts == ["score\t0", "exact_answer\t0", "grader/reason\tright"]


def test_alarms_and_differences_of_the_config(page):
    tab(page, "Alarms")
    assert ATTACKS[1] in page.locator("main tbody tr").first.inner_text()
    watchers = page.locator("#watchers tbody tr").all_inner_texts()
    assert watchers[0] == "entropy\t\t0.02\t1 alarm\t1 alarm"
    assert watchers[1] == "reward_std\tcritic/score/mean\t0.000001\tquiet\tquiet"
    tab(page, "Config")
    rows = page.locator("#config tbody tr")
    assert rows.count() == 2 and "run_dir" in rows.first.inner_text()
    assert rows.last.inner_text() == "actor.learning_rate\t0.001\t0.0003"
    page.get_by_label("differences only").uncheck()
    page.get_by_label("Search keys").fill("onerror")
    assert rows.count() == 1 and "actor.name" in rows.first.inner_text()


@pytest.mark.nightly
def test_the_tab_survives_a_reload(page):
    tab(page, "Alarms")
    page.get_by_label("reload").check()
    page.reload()
    assert page.get_by_role("tab", name="Alarms").get_attribute("aria-selected") == "true"
    assert page.get_by_label("reload").is_checked()
