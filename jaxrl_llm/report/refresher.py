"""The report of a run that goes on: a thread writes it again after steps, at bounded cost."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxrl_llm.report.html import REPORT, write_page
from jaxrl_llm.report.run_files import RunFiles
from jaxrl_llm.whole_files import TEMPORARY

EVERY_S = 20.0  # between two pages at least
SHARE = 0.02  # largest share of the time: 50 s pass after a page that took 1 s


class ReportRefresher:
    """Writes RUN/report.html in a thread of its own: after the first step, and then now and then.

    Guarantees: `step` only sets a flag. A page that cannot be written ends neither the run nor the
        thread; `message` gets the reason once.
    """

    def __init__(self, folder: Path, message: Callable[[str], None]):
        for left_over in folder.glob(TEMPORARY.format(name=REPORT, pid="*")):
            left_over.unlink(missing_ok=True)  # a process was killed
        self._files = RunFiles(folder)
        self._output = folder / REPORT
        self._message = message
        self._failed = False
        self._due, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)
        self._thread.start()

    def step(self) -> None:
        """There is something new to show."""
        self._due.set()

    def close(self) -> None:
        """Write the last page, and end the thread."""
        self._closed.set()
        self._due.set()
        self._thread.join()
        self._write()

    def _work(self) -> None:
        while not self._closed.is_set():
            self._due.wait()
            self._due.clear()
            if not self._closed.is_set():
                started = time.perf_counter()
                self._write()
                took = time.perf_counter() - started
                self._closed.wait(max(EVERY_S, took / SHARE))

    def _write(self) -> None:
        try:
            write_page([self._files], self._output)
        except Exception as error:  # the run is worth more than its picture
            if not self._failed:
                self._failed = True
                self._message(f"{self._output} was not written: {error!r}. The run goes on")
