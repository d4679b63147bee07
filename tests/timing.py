"""CPU seconds of every test, added up per folder and per file at the end of a session.

Wall time says little where other work shares the machine. A test's own processes count once they
have ended.
"""

import os
import resource
from collections import defaultdict

import pytest

DEAREST_FILES = 15


def cpu_seconds() -> float:
    """User and system seconds of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CpuReport:
    """A pytest plugin: measures where tests run, and prints where reports arrive."""

    def __init__(self) -> None:
        self._mark = cpu_seconds()
        self._of_file: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)
        self._wall: dict[str, float] = defaultdict(float)

    def pytest_runtest_logstart(self) -> None:
        self._mark = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = cpu_seconds()
        report.cpu_s, self._mark = now - self._mark, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._of_file[file] += getattr(report, "cpu_s", 0.0)
        self._wall[file] += report.duration
        self._tests[file].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._of_file:
            return
        folders: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for file, cpu in self._of_file.items():
            entry = folders[os.path.dirname(file)]
            for i, value in enumerate((cpu, self._wall[file], len(self._tests[file]))):
                entry[i] += value
        terminalreporter.section("CPU seconds of each folder (wall seconds, tests)")
        for folder, (cpu, wall, tests) in sorted(folders.items(), key=lambda item: -item[1][0]):
            terminalreporter.line(f"{cpu:8.1f} {wall:8.1f} {tests:6.0f}  {folder}")
        total = sum(cpu for cpu, _, _ in folders.values())
        terminalreporter.line(f"{total:8.1f} in all, without start and collection")
        terminalreporter.section(f"the {DEAREST_FILES} dearest files")
        dearest = sorted(self._of_file.items(), key=lambda item: -item[1])[:DEAREST_FILES]
        for file, cpu in dearest:
            terminalreporter.line(f"{cpu:8.1f} {self._wall[file]:8.1f}          {file}")
