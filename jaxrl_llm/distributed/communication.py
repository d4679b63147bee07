"""The traffic between devices: the collectives of a compiled program, by stage and mesh axis.

Everything is read from the program's text after partitioning, `Compiled.as_text()`. So the table
shows what XLA made of the sharding rules, not what was meant.

Bytes are the bytes that one device receives. In a group of n devices these are

    all-gather, all-to-all      (n - 1) / n of the output
    reduce-scatter              (n - 1) / n of the input
    all-reduce                  2 (n - 1) / n of the array: a reduce-scatter and an all-gather
    collective-permute          the whole array

A loop whose trip count XLA knows multiplies what it holds. A loop that runs as long as the data ask
for is named by the `jax.named_scope` around it, one of LOOPS. It is multiplied in each step.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from jaxrl_llm.distributed.device_groups import MeshAxes, parse_groups, parse_pairs

# Scopes of loops whose trip count is data. The count of a scope within another includes the
# repetitions of the outer one.
MICRO_BATCHES = "micro_batches"
PREFILLS = "prefills"
DECODE_STEPS = "decode_steps"
TAIL_STEPS = "tail_steps"  # decode steps too, of fewer slots; DECODE_STEPS counts them as well
LOOPS = (MICRO_BATCHES, PREFILLS, DECODE_STEPS, TAIL_STEPS)
UNKNOWN_LOOP = "unknown"  # a loop with neither a trip count nor a scope
NO_STAGE = "other"

KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
# Shares of the array that a device of a group of n receives.
SHARES = {"all-reduce": 2.0, "collective-permute": 1.0, "collective-broadcast": 1.0}
# Their groups are of replicas, of which a program of ours has one, unless the ids are global.
BY_REPLICA = ("all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all")

_GLOBAL = re.compile(r"\buse_global_device_ids=true")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,<= ]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SCOPE = re.compile(r"(\w+)\)*/while$")  # the scope of a loop, as in vmap(scope)/while
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_SEVERAL = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_NAMES = re.compile(r"%([\w.\-]+)")
_OF_INTEREST = re.compile(
    r" (?:all-|ragged-all|reduce-scatter|collective-)"
    r"|[ {](?:calls|body|to_apply|branch_computations|called_computations|true_computation)="
)
_TRIPS = re.compile(r'"?known_trip_count"?:\{"n":"(\d+)"\}')
_PAIRS = re.compile(r"source_target_pairs=(\{\{.*?\}\})")
_GROUPS = re.compile(
    r"replica_groups=(\{\}|\{\{.*?\}\}|mesh\[.*?\{.*?\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program, and how often a run of the program performs it."""

    name: str  # XLA's name of the instruction
    kind: str  # one of KINDS
    shape: str  # shape of the result, with its dtype
    bytes: float  # bytes that a device receives, each time
    axis: str  # mesh axes joined by "+", or OTHER
    stage: str
    times: int = 1  # by loops whose trip count is known
    loops: tuple[str, ...] = ()  # other loops around it, outermost first
    conditional: bool = False  # in the branch of a conditional that moves most


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    result: str
    opcode: str
    line: str

    @property
    def kind(self) -> str | None:
        """The kind of collective that begins here: of an asynchronous one only the start counts."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else None


@dataclass(kw_only=True)
class _Computation:
    lines: list[str] = field(default_factory=list)
    instructions: list[_Instruction] = field(default_factory=list)  # collectives and calls


@dataclass(frozen=True, kw_only=True)
class _Caller:
    """The surroundings of a computation."""

    stage: str | None = None
    times: int = 1
    loops: tuple[str, ...] = ()
    conditional: bool = False


def collectives(text: str, axes: MeshAxes, stages: Iterable[str]) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    `stages` are the names of its stages, each a `jax.named_scope` under the jitted function. An
    operation without a scope belongs to the stage that first uses its result.

    Requires: the program has the devices of the mesh, in its order.
    """
    return _Program(text, axes, stages).collectives()


def stage_pattern(stages: Iterable[str]) -> re.Pattern[str]:
    """Finds the stage, as group 1, in the scopes of an operation: `jit(function)/stage/...`."""
    names = "|".join(map(re.escape, stages)) or "(?!)"  # the latter matches nothing
    return re.compile(rf"(?:^|[(:])jit\([^)]*\)/({names})(?=[/:)]|$)")


class _Program:
    """The text of a program, as far as collectives need it."""

    def __init__(self, text: str, axes: MeshAxes, stages: Iterable[str]) -> None:
        self._axes = axes
        self._stage = stage_pattern(stages)
        self._computations, self._entry = _parse(text)
        self._moves = cache(self._has_collectives)

    def collectives(self) -> list[Collective]:
        return list(self._walk(self._entry, _Caller()))

    def _walk(self, name: str, caller: _Caller) -> Iterator[Collective]:
        computation = self._computations[name]
        for each in computation.instructions:
            if each.kind is not None:
                collective = self._collective(computation, each, caller)
                if collective.axis:  # empty where each group is one device
                    yield collective
                continue
            called = [name for name in _called(each) if self._moves(name)]
            if not called:
                continue
            inner = replace(caller, stage=self._stage_of(each.line) or caller.stage)
            if each.opcode == "while":
                yield from self._loop(each, inner)
            elif each.opcode == "conditional":
                inner = replace(inner, conditional=True)
                branches = [list(self._walk(branch, inner)) for branch in called]
                yield from max(branches, key=lambda b: sum(c.bytes * c.times for c in b))
            else:
                for name in called:
                    yield from self._walk(name, inner)

    def _loop(self, loop: _Instruction, caller: _Caller) -> Iterator[Collective]:
        condition, body = _attribute(loop.line, "condition"), _attribute(loop.line, "body")
        trips = _TRIPS.search(loop.line)
        if trips is not None:
            count = int(trips[1])
            yield from self._walk(body, replace(caller, times=caller.times * count))
            yield from self._walk(condition, replace(caller, times=caller.times * (count + 1)))
            return
        scope = _SCOPE.search(_op_name(loop.line))
        label = scope[1] if scope is not None and scope[1] in LOOPS else UNKNOWN_LOOP
        inner = replace(caller, loops=(*caller.loops, label))
        yield from self._walk(body, inner)
        yield from self._walk(condition, inner)

    def _collective(
        self, computation: _Computation, each: _Instruction, caller: _Caller
    ) -> Collective:
        kind = each.kind
        assert kind is not None
        shape = _moved(each)
        size = sum(_bytes(dtype, dims) for dtype, dims in _SHAPE.findall(shape))
        if kind == "collective-permute":
            pairs = _PAIRS.search(each.line)
            axis = self._axes.of_pairs(parse_pairs(pairs[1])) if pairs else ""
            share = 1.0
        else:
            groups = _GROUPS.search(each.line)
            parsed = parse_groups(groups[1] if groups else "{}", self._axes.num_devices)
            if "channel_id=" in each.line and kind in BY_REPLICA and not _GLOBAL.search(each.line):
                parsed = [list(range(self._axes.num_devices))]  # every partition of a replica
            axis, num = self._axes.of_groups(parsed), max(len(group) for group in parsed)
            share = SHARES.get(kind, 1.0) * (num - 1) / num
            # Its result is one part of n of what goes in.
            share *= num if kind == "reduce-scatter" else 1
        return Collective(
            name=each.name,
            kind=kind,
            shape=re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape),
            bytes=size * share,
            axis=axis,
            stage=self._stage_of(each.line)
            or caller.stage
            or self._neighbour(computation, each)
            or NO_STAGE,
            times=caller.times,
            loops=caller.loops,
            conditional=caller.conditional,
        )

    def _stage_of(self, line: str) -> str | None:
        scope = self._stage.search(_op_name(line))
        return scope[1] if scope else None

    def _neighbour(self, computation: _Computation, each: _Instruction) -> str | None:
        """The stage that first uses the result, also indirectly; else the last that it is from."""
        start = f"%{each.name} ="
        at = next(i for i, line in enumerate(computation.lines) if start in line)
        joined = {each.name}
        for line in computation.lines[at + 1 :]:
            name, *used = _NAMES.findall(line)
            if not joined.isdisjoint(used):
                if stage := self._stage_of(line):
                    return stage
                joined.add(name)
        joined = set(_NAMES.findall(each.line))
        for line in reversed(computation.lines[:at]):
            name, *used = _NAMES.findall(line)
            if name in joined:
                if stage := self._stage_of(line):
                    return stage
                joined.update(used)
        return None

    def _has_collectives(self, name: str) -> bool:
        computation = self._computations.get(name)
        return computation is not None and any(
            each.kind is not None or any(map(self._moves, _called(each)))
            for each in computation.instructions
        )


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """Every computation by its name, and the name of the one that the program begins with."""
    computations: dict[str, _Computation] = {}
    current, entry = _Computation(), ""
    for line in text.splitlines():
        begun = _COMPUTATION.match(line)
        if begun is not None:
            current = computations[begun[2]] = _Computation()
            entry = begun[2] if begun[1] else entry
        elif line.startswith(" "):
            current.lines.append(line)
            if _OF_INTEREST.search(line) and (match := _INSTRUCTION.match(line)):
                name, result, opcode = match.groups()
                # `to_apply` of a collective is what it computes of two numbers; all that ends an
                # asynchronous call repeats what its start says.
                if not opcode.endswith(("-done", "-update")):
                    each = _Instruction(name=name, result=result, opcode=opcode, line=line)
                    current.instructions.append(each)
    assert entry, f"no ENTRY in {text[:100]!r}"
    return computations, entry


def _called(each: _Instruction) -> list[str]:
    """The computations that an instruction runs."""
    several = _SEVERAL.search(each.line)
    names = [name.strip().lstrip("%") for name in several[1].split(",")] if several else []
    return [*names, *_CALLED.findall(each.line)]


def _attribute(line: str, name: str) -> str:
    match = re.search(rf"\b{name}=%?([\w.\-]+)", line)
    assert match is not None, f"{name} is not in {line[:200]}"
    return match[1]


def _op_name(line: str) -> str:
    match = _OP_NAME.search(line)
    return match[1] if match else ""


def _moved(each: _Instruction) -> str:
    """The shape of a collective's result; operands of `-start` are dropped."""
    if not each.opcode.endswith("-start"):
        return each.result
    parts = _top_level(each.result)
    if each.kind == "all-reduce" and not (parts and parts[0].startswith("(")):
        return each.result
    return parts[1]


def _top_level(shape: str) -> list[str]:
    """The elements of a tuple's shape; none for an array."""
    if not shape.startswith("("):
        return []
    parts, depth = [""], 0
    for character in shape[1:-1]:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [re.sub(r"/\*.*?\*/", "", part).strip() for part in parts]


def _bytes(dtype: str, dims: str) -> float:
    """Bytes of an array. Every dtype except booleans has its bits in its name."""
    bits = re.match(r"[a-z]+(\d+)", dtype)
    bits_each = int(bits[1]) if bits else (8 if dtype == "pred" else 0)
    sizes = [int(dim.strip("<= ")) for dim in dims.split(",") if dim.strip()]
    return math.prod(sizes) * bits_each / 8


# ------------------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True)
class Part:
    """Collectives of one row that are repeated by the same loops."""

    loops: tuple[str, ...]
    count: int
    bytes: float
    conditional: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """The traffic of a stage over an axis by one kind of collective."""

    stage: str
    axis: str
    kind: str
    parts: tuple[Part, ...]

    def totals(self, counts: Mapping[str, float]) -> "Totals":
        """Count and bytes of one run of the program, in which loops ran as `counts` say."""
        count = size = 0.0
        notes: dict[str, None] = {}
        for part in self.parts:
            times, missing = repetitions(part.loops, counts)
            count += part.count * times
            size += part.bytes * times
            notes |= dict.fromkeys(missing)
            if part.conditional:
                notes["the largest branch of a conditional"] = None
        return Totals(count=count, bytes=size, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals of a row: number of collectives, bytes a device receives, and what is not exact."""

    count: float
    bytes: float
    notes: tuple[str, ...]


def repetitions(loops: Sequence[str], counts: Mapping[str, float]) -> tuple[float, list[str]]:
    """The iteration count of nested loops, and the loops without a known count.

    The innermost loop with a count decides, as its count includes those around it. A loop without a
    count inside it counts once.
    """
    missing: list[str] = []
    for label in reversed(loops):
        if label == TAIL_STEPS:
            return 0.0, ["decode steps of a tail, counted as steps of all slots"]
        if label in counts:
            return counts[label], missing
        of = "a loop" if label == UNKNOWN_LOOP else label.replace("_", " ")
        missing.append(f"one iteration of {of}: how many there are is not known")
    return 1.0, missing


def table(collectives: Iterable[Collective]) -> list[Row]:
    """The rows of a program, in the order of its stages' first collectives."""
    groups: dict[tuple[str, str, str], dict[tuple[tuple[str, ...], bool], list[Collective]]] = {}
    for each in collectives:
        parts = groups.setdefault((each.stage, each.axis, each.kind), {})
        parts.setdefault((each.loops, each.conditional), []).append(each)
    return [
        Row(
            stage=stage,
            axis=axis,
            kind=kind,
            parts=tuple(
                Part(
                    loops=loops,
                    count=sum(each.times for each in members),
                    bytes=sum(each.bytes * each.times for each in members),
                    conditional=conditional,
                )
                for (loops, conditional), members in parts.items()
            ),
        )
        for (stage, axis, kind), parts in groups.items()
    ]
