"""One run as the page shows it, read from its folder."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jaxrl_llm.observability.jsonl import read_jsonl
from jaxrl_llm.observability.names import WATCHED
from jaxrl_llm.report.curves import MetricsFile
from jaxrl_llm.report.samples import Trace
from jaxrl_llm.report.token_texts import TokenTexts

METRICS, EVENTS, CONFIG, ABOUT = "metrics.jsonl", "events.jsonl", "config.json", "about.json"
MOST_ALARMS = 500
# Metrics of which the page shows the median or the sum; of few points they would be others.
TOTALS = ("timing_s/", "perf/throughput")


class RunFiles:
    """The folder of one run. `read` may be called again while the run goes on; it is cheap."""

    def __init__(self, folder: Path, name: str = ""):
        self.folder = folder
        self.name = name or folder.resolve().name
        self._metrics: dict[str, MetricsFile] = {}
        self._trace = Trace(folder / "trace")
        self._texts = TokenTexts(folder / "checkpoints" / "huggingface")

    def read(self) -> dict[str, Any]:
        """The run as the page takes it: name, about, config, curves, alarms, samples and so on."""
        curves, config = self._curves(), _object_in(self.folder / CONFIG)
        samples, left_out = self._trace.samples()
        events = [path for path in [self.folder / EVENTS] if path.exists()]
        alarms = list(read_jsonl(events, key="step"))
        return {
            "name": self.name,
            "about": _object_in(self.folder / ABOUT),
            "config": dict(flat(config)),
            "curves": curves,
            "alarms": alarms[-MOST_ALARMS:],
            "num_alarms": len(alarms),
            "watchers": _watchers(config.get("alarms"), curves),
            "samples": samples,
            "images": self._trace.images(samples),
            "samples_left_out": left_out,
            "texts": self._texts.of({token for s in samples for token in s["tokens"]}),
        }

    def _curves(self) -> dict[str, Any]:
        """By metric; names of a supervised training begin with the name of its folder."""
        found: dict[str, Any] = {}
        for path in [self.folder / METRICS, *sorted(self.folder.glob(f"*/{METRICS}"))]:
            prefix = "" if path.parent == self.folder else f"{path.parent.name}: "
            file = self._metrics.setdefault(prefix, MetricsFile(path))
            if file.read():  # the run has resumed: it writes its trace again, too
                self._trace.forget()
            for name, curve in file.curves.items():
                found[prefix + name] = curve.to_json(with_totals=name.startswith(TOTALS))
        return found


def open_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Runs to compare, each by the name of its folder; by its path where names are not enough."""
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [RunFiles(folder, "" if unique else str(folder)) for folder in folders]


def is_run(folder: Path) -> bool:
    """True when a folder has the files of a run. A model has a config.json as well."""
    return (folder / METRICS).exists() or "total_steps" in _object_in(folder / CONFIG)


def flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as JSON) of nested objects."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, json.dumps(value, ensure_ascii=False)


def _watchers(alarms: Any, curves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each watcher with its settings and the metrics of the run that it watches."""
    settings = alarms if isinstance(alarms, Mapping) else {}
    return [
        {
            "name": name,
            "action": setting.get("action"),
            "threshold": setting.get("threshold"),
            "metrics": ["all"] if WATCHED[name] == ("*",) else _matching(curves, WATCHED[name]),
        }
        for name, setting in settings.items()
        if name in WATCHED and isinstance(setting, Mapping)
    ]


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return sorted(name for name in names if any(fnmatchcase(name, p) for p in patterns))


def _object_in(file: Path) -> dict[str, Any]:
    """The object of a JSON file; empty where there is none, or while it is half written."""
    try:
        found = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
