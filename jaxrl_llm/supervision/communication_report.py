"""The communication of a run's devices in each step: metrics, a file and a table.

`distributed/communication.py` reads the collectives of each compiled program. A step multiplies
those in loops by the loops' counts, which are metrics of the step. On one device nothing is done.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.distributed.communication import Collective, Row, Totals, collectives, table
from jaxrl_llm.distributed.device_groups import MeshAxes
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.distributed.transfer import takes_part
from jaxrl_llm.observability import profile
from jaxrl_llm.observability.console import number
from jaxrl_llm.program.program import Program
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.supervision.listener import Listener
from jaxrl_llm.supervision.profiling import UNTIMED, Key, StepProfiler, time_collectives
from jaxrl_llm.whole_files import write_whole

GROUPS = "groups of devices"  # where the first has one
FILE = "communication.json"
SMALL = 1e-3  # share of all bytes
COUNTED = (
    "bytes that one device receives: all-gather and all-to-all (n-1)/n of the output, "
    "reduce-scatter (n-1)/n of the input, all-reduce 2(n-1)/n, collective-permute the whole"
)


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One row of a step's table."""

    program: str
    row: Row
    totals: Totals

    @property
    def key(self) -> Key:
        return self.program, self.row.stage, self.row.axis, self.row.kind

    def names(self) -> dict[str, str]:
        return dict(zip(("program", "stage", "axis", "collective"), self.key, strict=True))

    def to_json(self) -> dict[str, Any]:
        row, totals = self.row, self.totals
        return {
            **self.names(),
            "count": totals.count,
            "bytes": totals.bytes,
            "notes": list(totals.notes),
            "parts": [
                {"loops": list(part.loops), "count": part.count, "bytes": part.bytes}
                for part in row.parts
            ],
        }


@dataclass(kw_only=True)
class Known:
    """A compiled program whose collectives were read."""

    collectives: list[Collective]
    rows: list[Row]
    runs: int = 0  # before the current step


@dataclass(kw_only=True)
class CommunicationReport(Listener):
    """The tables of the programs that a run's own steps run."""

    program_of: Callable[[int], Program]  # program by step
    profiler: StepProfiler
    folder: Path
    every: int  # steps between tables on the console; 0 never
    total_steps: int
    message: Callable[[str], None]
    rows: list[StepRow] = field(default_factory=list)  # rows of the last step
    profiles: list[dict[str, Any]] = field(default_factory=list)  # times of traced steps
    # Programs of devices of other processes, which this one does not compile.
    left_out: list[str] = field(default_factory=list)
    _program: Program | None = None
    _known: dict[str, Known] = field(default_factory=dict)

    def measured(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """The communication of a step; the file and the table where they are due.

        The main process alone gets metrics and writes.
        """
        program, trace = self.program_of(step), self.profiler.trace
        if all(mesh.size == 1 for mesh in program.meshes):
            return {}
        first = self._read(program)
        if not is_main():
            return {}
        self.rows = self._rows(program, step, metrics)
        if trace is not None:
            self._time(step, trace)
        due = self.every and step % self.every == 0
        if first or due or trace is not None or step == self.total_steps:
            self.write(step, program)
        if due or (self.every and first):
            self.message("\n".join(table_lines(step, program.mesh.shape, self.rows)))
        received: dict[str, float] = {}
        for each in self.rows:
            name = f"communication/{each.row.stage}/{each.row.axis}/{each.row.kind}_gb"
            received[name] = received.get(name, 0.0) + each.totals.bytes / 1e9
        return received

    def write(self, step: int, program: Program) -> None:
        """RUN/communication.json, of the last step."""
        mesh = program.mesh
        content = {
            "step": step,
            "mesh": dict(mesh.shape),
            "device": mesh.devices.flat[0].device_kind,
            "counted": COUNTED,
            "rows": [each.to_json() for each in self.rows],
            "left_out": self.left_out,
            "profiles": self.profiles,
        }
        write_whole(self.folder / FILE, json.dumps(content, indent=1) + "\n")

    def _time(self, step: int, trace: Path) -> None:
        """Read the trace of a step: the time of its rows."""
        events = profile.first_gpu(profile.read(trace))
        about: dict[str, Any] = {"step": step, "trace": str(trace.relative_to(self.folder))}
        self.profiles.append(about)
        if not events:
            about["note"] = UNTIMED
            self.message(UNTIMED)
            return
        programs = {name: known.collectives for name, known in self._known.items()}
        times, missing = time_collectives(events, programs)
        about["rows"] = [
            {
                **each.names(),
                "bytes": each.totals.bytes,
                **times[each.key].to_json(each.totals.bytes),
            }
            for each in self.rows
            if each.key in times
        ]
        about["ms_of_no_row"] = 1e3 * missing
        seconds = sum(each.seconds for each in times.values())
        hidden = sum(each.hidden for each in times.values()) / seconds if seconds else 0.0
        self.message(f"its collectives took {1e3 * seconds:.3g} ms, {hidden:.0%} behind other work")

    def _read(self, program: Program) -> bool:
        """Read the programs that ran for the first time; whether there was one."""
        if program is not self._program:
            self._program, self._known = program, {}  # a phase has programs of its own
            self.left_out = []
        new = [s for s in program.segments if s.name not in self._known and program.runs[s.name]]
        for segment in new:
            compiled = None
            if takes_part(program.mesh_of(segment)):
                compiled = program.compiled(segment)
            else:
                self.left_out.append(segment.name)
            own: list[Collective] = []
            if is_main() and compiled is not None:
                text = compiled.as_text()
                assert text is not None
                axes = _axes(program.mesh_of(segment))
                own = collectives(text, axes, [stage.name for stage in segment.stages])
            self._known[segment.name] = Known(collectives=own, rows=table(own))
        return bool(new)

    def _rows(self, program: Program, step: int, metrics: Mapping[str, float]) -> list[StepRow]:
        rows: list[StepRow] = []
        for segment in program.segments:
            known = self._known.get(segment.name)
            if known is None:
                continue
            runs = program.runs[segment.name] - known.runs
            known.runs += runs
            names = [stage.name for stage in segment.stages]
            for row in sorted(known.rows, key=lambda row: _place(row.stage, names)):
                counts = _loop_counts(segment, row.stage, step, metrics)
                if runs and counts is not None:
                    totals = row.totals(counts)
                    all_runs = Totals(
                        count=totals.count * runs, bytes=totals.bytes * runs, notes=totals.notes
                    )
                    rows.append(StepRow(program=segment.name, row=row, totals=all_runs))
        return rows


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _axes(mesh: Mesh) -> MeshAxes:
    shape = mesh.shape
    return MeshAxes(names=tuple(map(str, shape)), sizes=tuple(shape.values()))


def _loop_counts(
    segment: Segment, name: str, step: int, metrics: Mapping[str, float]
) -> dict[str, float] | None:
    """The counts of a stage's loops; None for a stage that has not begun."""
    for stage in segment.stages:
        if stage.name == name:
            known = dict(stage.loop_metrics)
            counts = {loop: float(metrics[key]) for loop, key in known.items() if key in metrics}
            return counts if step >= stage.first_step else None
    return {}


def table_lines(step: int, mesh: Mapping[Any, int], rows: Sequence[StepRow]) -> list[str]:
    """The table as lines of plain text; what is less than SMALL of all is one line."""
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    title = f"step {step} on {sizes or GROUPS}: what a device received; * is explained in {FILE}"
    least = SMALL * sum(each.totals.bytes for each in rows)
    shown = [each for each in rows if each.totals.bytes > least]
    small = [each for each in rows if each.totals.bytes <= least]
    cells = [("stage", "axis", "collective", "count", "GB")]
    for each in shown:
        names = (each.row.stage, each.row.axis, each.row.kind)
        cells.append((*names, *_figures([each])))
    if small:
        cells.append((f"{len(small)} others", "", "", *_figures(small)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [title, *(_line(line, widths) for line in cells)]


def _figures(rows: Sequence[StepRow]) -> tuple[str, str]:
    count = sum(each.totals.count for each in rows)
    size = sum(each.totals.bytes for each in rows)
    flag = "*" if any(each.totals.notes for each in rows) else " "
    return number(count), number(size / 1e9) + flag


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    names = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    figures = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  " + "  ".join([*names, *figures])
