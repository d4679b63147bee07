"""Results as JSON lines, as a table, and as ratios to the peers. No jax."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

SHOWN = 12  # kernels of a profile in the table; the others together


@dataclass(frozen=True)
class Kernel:
    """All calls of one kernel; overlapping time counts for one kernel only."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Profile:
    """The kernels of the first device in a recording."""

    seconds: float
    busy: float  # seconds in which at least one kernel ran
    kernels: tuple[Kernel, ...]  # largest first

    def to_json(self) -> dict[str, Any]:
        """Every kernel as a plain list: name, seconds, calls."""
        kernels = [[kernel.name, kernel.seconds, kernel.calls] for kernel in self.kernels]
        return {"seconds": self.seconds, "busy": self.busy, "kernels": kernels}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case as one implementation ran it: `who` is ours, or a peer's name."""

    benchmark: str
    shape: str
    case: str
    who: str = "ours"
    seconds: tuple[float, ...] = ()  # one entry a repeat; empty when it could not run
    memory_bytes: int | None = None  # arguments, results and temporaries of the program
    figures: dict[str, float] = field(default_factory=dict)
    checks: dict[str, float] = field(default_factory=dict)
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)  # versions of a peer in its own process
    profile: dict[str, Profile] = field(default_factory=dict)  # a profile a part, with --profile
    profile_error: str = ""  # why there is no profile; the measurement stays valid

    @property
    def median(self) -> float:
        """Median seconds of a run."""
        return statistics.median(self.seconds)

    @property
    def key(self) -> str:
        """The name of the case, the same for us and for its peers."""
        return f"{self.benchmark}/{self.shape}/{self.case}"

    def to_json(self, about: dict[str, Any]) -> str:
        """The whole row in one line; `about` holds what all rows of the command share."""
        record: dict[str, Any] = {
            "benchmark": self.benchmark,
            "shape": self.shape,
            "case": self.case,
            "who": self.who,
        }
        if self.seconds:
            record |= {
                "seconds": self.median,
                "seconds_min": min(self.seconds),
                "seconds_max": max(self.seconds),
                "repeats": len(self.seconds),
            }
        if self.memory_bytes is not None:
            record["memory_bytes"] = self.memory_bytes
        record |= {"figures": self.figures, "checks": self.checks}
        if self.error:
            record["error"] = self.error
        if self.profile_error:
            record["profile_error"] = self.profile_error
        if self.profile:
            record["profile"] = {name: part.to_json() for name, part in self.profile.items()}
        versions = about.get("versions", {}) | self.versions
        return json.dumps(record | about | {"versions": versions})


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Our time and memory over each peer's: `<key>/<peer>/time` and `/memory`."""
    ours = {row.key: row for row in rows if row.who == "ours" and _right(row)}
    quotients = {}
    for row in rows:
        own = ours.get(row.key)
        if row.who == "ours" or own is None or not _right(row):
            continue
        quotients[f"{row.key}/{row.who}/time"] = own.median / row.median
        if own.memory_bytes and row.memory_bytes:
            quotients[f"{row.key}/{row.who}/memory"] = own.memory_bytes / row.memory_bytes
    return quotients


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a table of every case, then the failures."""
    table = Table(title="median of the repeats (least to most)")
    for name in ("shape", "case", "who", "time", "memory", "figures", "checks"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        if row.error:
            continue
        table.add_row(
            row.shape,
            row.case,
            row.who,
            _times(row.seconds) if row.seconds else "",
            "" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.2f} GiB",
            _figures(row.figures),
            _figures(row.checks),
        )
    console.print(table)
    for row in rows:
        for part, profile in row.profile.items():
            console.print(_kernels(f"{row.key} {part}", profile))
    for name, value in ratios(rows).items():
        console.print(f"ratio {name}: {value:.3f}", highlight=False)
    for row in rows:
        if row.error:
            console.print(f"failed {row.key} ({row.who}): {row.error}", markup=False)
        if row.profile_error:
            console.print(f"no profile of {row.key}: {row.profile_error}", markup=False)


def _kernels(title: str, profile: Profile) -> Table:
    idle = 1 - profile.busy / profile.seconds
    table = Table(title=f"{title}: {profile.seconds:.4g} s, {idle:.1%} without a kernel")
    for name in ("kernel", "share", "seconds", "calls", "us a call"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    shown, rest = profile.kernels[:SHOWN], profile.kernels[SHOWN:]
    lines = [(kernel.name, kernel.seconds, kernel.calls) for kernel in shown]
    if rest:
        other = f"{len(rest)} smaller ones"
        lines.append((other, sum(k.seconds for k in rest), sum(k.calls for k in rest)))
    for name, seconds, calls in lines:
        share = f"{seconds / profile.seconds:.1%}"
        table.add_row(name, share, f"{seconds:.4g}", f"{calls:,}", f"{seconds / calls * 1e6:.4g}")
    return table


def _right(row: Row) -> bool:
    """True for a row whose time may be compared."""
    return bool(row.seconds) and not row.error


def _times(seconds: Sequence[float]) -> str:
    scale, unit = (1e3, "ms") if min(seconds) < 1 else (1.0, "s")
    low, middle, high = (
        x * scale for x in (min(seconds), statistics.median(seconds), max(seconds))
    )
    return f"{middle:.4g} {unit}\n({low:.4g} to {high:.4g})"


def _figures(values: dict[str, float]) -> str:
    return "\n".join(f"{name} {value:,.4g}" for name, value in values.items())
