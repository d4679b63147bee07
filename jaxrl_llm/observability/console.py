"""The progress that a user sees: a live view on a terminal, plain lines elsewhere."""

import fnmatch
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxrl_llm.observability.status import STATUS

# (metric, short name) of the metrics that are shown, in this order.
HEADLINES = (
    ("critic/score/mean", "reward"),
    ("val-core/*/acc/mean@*", "held-out"),
    ("val-core/*/reward/mean@*", "held-out reward"),
    ("sft/loss", "loss"),
    ("sft/eval_accuracy", "held-out"),
    ("teacher/loss", "loss"),
    ("teacher/eval_accuracy", "held-out"),
    ("reward_model/loss", "loss"),
    ("reward_model/accuracy", "accuracy"),
    ("reward_model/eval_accuracy", "held-out"),
    ("loss", "loss"),
    ("eval_loss", "held-out loss"),
    ("accuracy", "accuracy"),
    ("eval_accuracy", "held-out accuracy"),
    ("rewards/accuracies", "accuracy"),
    ("eval_rewards/accuracies", "held-out accuracy"),
    ("rewards/margins", "margin"),
    ("kl", "kl"),
    ("actor/entropy", "entropy"),
    ("actor/ppo_kl", "kl"),
    ("actor/pg_loss", "pg loss"),
    ("critic/vf_loss", "vf loss"),
    ("response_length/mean", "length"),
    ("rewards/failures", "reward failures"),
    ("perf/throughput", "tokens/s/device"),
    ("perf/time_per_step", "s/step"),
)
PATIENCE_S = 10.0  # a stage that takes longer is named in a plain log
PLAIN_WIDTH = 160  # characters of a text in a plain line
SMOOTHING = 0.2  # weight of the latest step in the moving mean of a step's time


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A sample as the console shows it."""

    question: str  # the last turn of the user
    response: str
    score: float
    truth: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # score of each function

    def reward(self) -> str:
        """The score, and its parts where there are several."""
        parts = ", ".join(f"{name} {part:.3g}" for name, part in self.parts.items())
        return f"{self.score:.3g}" + (f" ({parts})" if len(self.parts) > 1 else "")


class Console:
    """Shows progress, time left, the main metrics, and samples.

    On a terminal the view is redrawn in place, and other output scrolls above it. Elsewhere every
    step is one line without control codes. `every` and `samples_every` count steps; step 1 also
    shows samples, and with `samples_every` 0 none are shown.

    Requires: the caller closes it. A live view hides the cursor.
    """

    def __init__(
        self,
        *,
        file: TextIO | None = None,
        every: int = 1,
        samples_every: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ):
        STATUS.end()
        out: TextIO = sys.stdout if file is None else file
        self._display = _LiveDisplay(out) if out.isatty() else _PlainDisplay(out)
        self._every = max(every, 1)
        self._samples_every = samples_every
        self._clock = clock
        self._phase = "step"
        self._total_steps = self._last_step = 0
        self._last_time = clock()
        self._seconds_per_step, self._num_timed = 0.0, 0

    def begin(self, phase: str, total_steps: int, first_step: int = 0) -> None:
        """Start a phase, such as the warm-up, of which `first_step` steps are done."""
        self._phase = phase
        self._total_steps, self._last_step = total_steps, first_step
        self._last_time = self._clock()
        self._seconds_per_step, self._num_timed = 0.0, 0
        self._display.begin(phase, total_steps, first_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a step of the current phase."""
        left = self._time_left(step)
        if step % self._every == 0 or step >= self._total_steps:
            self._display.step(self._phase, step, self._total_steps, left, headlines(metrics))

    def status(self, text: str) -> None:
        """Show the work before the first step."""
        self._display.status(text)

    def stage(self, step: int, running: Sequence[str]) -> None:
        """Show the current stage of a step; in a plain log, of the first step only."""
        first = self._num_timed == 0 and step > self._last_step
        self._display.stage(step, " and ".join(running), first)

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Show samples in step 1, and then every `samples_every` steps."""
        if self._samples_every and (step == 1 or step % self._samples_every == 0):
            self._display.samples(step, samples)

    def message(self, text: str) -> None:
        """Show a line that stays, such as a warning."""
        self._display.message(text)

    def close(self) -> None:
        """Keep the last view on the screen and release the terminal."""
        self._display.close()

    def _time_left(self, step: int) -> float | None:
        """Seconds to the end of the phase, from a moving mean.

        None until the second step: the first one includes compilation.
        """
        now, done = self._clock(), step - self._last_step
        if done > 0:
            latest = (now - self._last_time) / done
            # The second step replaces the time of the first.
            weight = SMOOTHING if self._num_timed > 1 else 1.0
            self._seconds_per_step += weight * (latest - self._seconds_per_step)
            self._num_timed += 1
            self._last_step, self._last_time = step, now
        if self._num_timed < 2:
            return None
        return self._seconds_per_step * max(self._total_steps - step, 0)


class _PlainDisplay:
    """One line a step, and one for each stage of the first step that takes long."""

    def __init__(self, file: TextIO):
        self._file = file
        self._patience: threading.Timer | None = None

    def _line(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def begin(self, phase: str, total_steps: int, first_step: int) -> None:
        since = f" from step {first_step}" if first_step else ""
        self._line(f"{phase}: {total_steps} steps{since}")

    def step(
        self, phase: str, step: int, total: int, left: float | None, shown: dict[str, float]
    ) -> None:
        parts = [f"{phase} {step}/{total}"]
        parts += [f"{name} {number(value)}" for name, value in shown.items()]
        if left is not None and step < total:
            parts.append(f"left {duration(left)}")
        self._line(" | ".join(parts))

    def status(self, text: str) -> None:
        self._line(f"start: {text}")

    def stage(self, step: int, running: str, first: bool) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if running and first:
            text = f"step {step} is in {running}; the first step compiles its programs"
            self._patience = threading.Timer(PATIENCE_S, self._line, [text])
            self._patience.daemon = True
            self._patience.start()

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        for one in samples:
            parts = [f"  sample | reward {one.reward()} | {shown(one.question)}"]
            parts[0] += f" -> {shown(one.response)}"
            if one.truth is not None:
                parts.append(f"truth {shown(one.truth)}")
            self._line(" | ".join(parts))

    def message(self, text: str) -> None:
        for line in text.split("\n"):
            self._line(printable(line))

    def close(self) -> None:
        self.stage(0, "", False)
        self._file.flush()


class _LiveDisplay:
    """A progress bar over a table of metrics, redrawn in place by rich."""

    def __init__(self, file: TextIO):
        self._console = RichConsole(file=file, highlight=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._task = None
        self._shown: dict[str, float] = {}
        self._now = _Now()
        self._live = Live(self._view(), console=self._console, refresh_per_second=4)

    def begin(self, phase: str, total_steps: int, first_step: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(
            phase, total=total_steps, completed=first_step, left=""
        )
        self._shown = {}
        self._live.update(self._view())
        self._live.start()  # a second start has no effect

    def step(
        self, phase: str, step: int, total: int, left: float | None, shown: dict[str, float]
    ) -> None:
        assert self._task is not None, "begin a phase first"
        eta = "" if left is None else f"{duration(left)} left"
        self._progress.update(self._task, completed=step, left=eta)
        self._shown |= shown  # keeps metrics that not every step has
        self._live.update(self._view())

    def _view(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        names = list(self._shown)
        half = -(-len(names) // 2)
        for left, right in zip(names[:half], [*names[half:], ""], strict=False):
            cells = [left, number(self._shown[left])]
            cells += [right, number(self._shown[right])] if right else ["", ""]
            table.add_row(*(Text(cell) for cell in cells))
        return Group(table, self._progress, self._now)

    def status(self, text: str) -> None:
        self._now.begin(text, "")
        self._live.start()

    def stage(self, step: int, running: str, first: bool) -> None:
        self._now.begin(running, "it is compiled first" if first else "")

    def samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        heads = ("prompt", "response", "truth", "reward")
        table = Table(*heads, title=f"samples of step {step}")
        for one in samples:
            cells = (one.question, one.response, one.truth or "", one.reward())
            table.add_row(*(Text(shown(cell)) for cell in cells))  # Text has no markup
        self._console.print(table)

    def message(self, text: str) -> None:
        self._console.print(Text("\n".join(map(printable, text.split("\n")))))

    def close(self) -> None:
        self._live.stop()


class _Now:
    """The stage that goes on, with a spinner and its seconds: drawn again by each refresh."""

    def __init__(self) -> None:
        self._spinner = Spinner("dots")
        self._text, self._note, self._since = "", "", 0.0

    def begin(self, text: str, note: str) -> None:
        """Another stage, or none."""
        self._text, self._note, self._since = text, note, time.monotonic()

    def __rich_console__(
        self, console: RichConsole, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        seconds = time.monotonic() - self._since
        parts = [self._text, duration(seconds), self._note]
        self._spinner.update(text=Text("  ".join(part for part in parts if part)))
        yield self._spinner if self._text else Text("")


def headlines(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The main metrics among those given, by their short names."""
    short_names: dict[str, float] = {}
    for pattern, label in HEADLINES:
        names = fnmatch.filter(metrics, pattern)
        if label == "held-out reward":  # with grades of 0 and 1 it is the accuracy
            names = [n for n in names if metrics[n] != metrics.get(n.replace("/reward/", "/acc/"))]
        for name in names:
            # With several validation sources, the name of each is added.
            short = label if len(names) == 1 else f"{label} {name.split('/')[1]}"
            short_names[short] = float(metrics[name])
    if short_names.get("reward failures") == 0.0:
        del short_names["reward failures"]
    return short_names


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, or as 2:03 below one hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str) -> str:
    """`text` with line breaks and control codes escaped: a response must not control a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def shown(text: str) -> str:
    """A text on one line, cut to a length that a line has room for."""
    return clip(printable(text))


def clip(text: str) -> str:
    """The first PLAIN_WIDTH characters of a text."""
    return text if len(text) <= PLAIN_WIDTH else text[: PLAIN_WIDTH - 3] + "..."
