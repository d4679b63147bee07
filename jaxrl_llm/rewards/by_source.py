"""Grading of held-out answers by the grader of their data source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.references import nearest
from jaxrl_llm.rewards.manager import RewardFailure, RewardManager

if TYPE_CHECKING:  # types.py imports jax, which a program that only grades does not need
    from jaxrl_llm.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class Grades:
    """One grade a sample, in the order of the samples."""

    scores: np.ndarray  # float32 [N]
    extras: list[dict[str, Any]]
    failures: list[RewardFailure]  # in any order; `index` is the sample's place

    def reasons(self) -> dict[int, list[str]]:
        """Why samples could not be graded, by their index."""
        reasons: dict[int, list[str]] = {}
        for failure in self.failures:
            reasons.setdefault(failure.index, []).append(failure.describe())
        return reasons


@dataclass(frozen=True, kw_only=True)
class SourceGraders:
    """Graders of single data sources, and one grader for all others."""

    default: RewardManager
    by_source: Mapping[str, RewardManager]

    def check(
        self, columns: Mapping[str, Sequence[str]], renamed: Mapping[str, str] | None = None
    ) -> None:
        """Before anything is generated: whether the graders fit the held-out rows.

        `columns` has the columns of the rows by source. Raises ValueError for a grader of a source
        without rows, and for a column that a grader asks for and its rows do not have.
        """
        for name, grader in self.by_source.items():
            if name not in columns:
                raise ValueError(
                    f"config.validation.graders has a grader for the source {name!r}, and it "
                    f"has no held-out row{nearest(name, columns)}. The sources are: "
                    f"{', '.join(sorted(columns))}. Leave that grader out, or add rows"
                )
            grader.check(columns[name], renamed)
        others = [names for source, names in columns.items() if source not in self.by_source]
        if others:
            self.default.check(sorted({name for names in others for name in names}), renamed)

    def unreadable(self, prompts: "Sequence[Prompt]") -> dict[str, str]:
        """`RewardManager.unreadable` of each grader, on the rows that it grades."""
        sources = {id(grader): f" of {source}" for source, grader in self.by_source.items()}
        all_faults: dict[str, str] = {}
        for grader, rows in self._rows(prompts):
            source = sources.get(id(grader), "")
            faults = grader.unreadable([prompts[i].ground_truth for i in rows])
            all_faults |= {name + source: fault for name, fault in faults.items()}
        return all_faults

    def score(
        self, prompts: "Sequence[Prompt]", completions: "Sequence[Completion]", step: int
    ) -> Grades:
        """Grade completion i as an answer to prompt i."""
        scores = np.zeros(len(prompts), np.float32)
        extras: list[dict[str, Any]] = [{} for _ in prompts]
        failures: list[RewardFailure] = []
        for grader, rows in self._rows(prompts):
            result = grader.score([prompts[i] for i in rows], [completions[i] for i in rows], step)
            scores[rows] = result.scores
            for i, extra in zip(rows, result.extras, strict=True):
                extras[i] = extra
            failures += [replace(failure, index=rows[failure.index]) for failure in result.failures]
        return Grades(scores=scores, extras=extras, failures=failures)

    def _rows(self, prompts: "Sequence[Prompt]") -> list[tuple[RewardManager, list[int]]]:
        """The samples of each grader."""
        by_source: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            source = prompt.data_source if prompt.data_source in self.by_source else ""
            by_source.setdefault(source, []).append(i)
        return [(self.by_source.get(name, self.default), rows) for name, rows in by_source.items()]
