"""Counts and moments of numbers, which add up over the processes that saw parts of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Count and sum of some numbers, and the sum of squared distances from the mean."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Moments":
        """The moments of `values`, in float64."""
        x = np.asarray(values, np.float64)
        if not x.size:
            return cls()
        total = float(x.sum())
        return cls(x.size, total, float(np.square(x - total / x.size).sum()))

    def __add__(self, other: "Moments") -> "Moments":
        """The moments of the numbers of both (Chan et al. 1983)."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        between = np.square(self.mean - other.mean) * self.count * other.count / count
        squares = float(self.squares + other.squares + between)
        return Moments(count, self.total + other.total, squares)

    @property
    def mean(self) -> float:
        """The mean. Requires: there are numbers."""
        return self.total / self.count

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 0 for a single number."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0

    @property
    def numbers(self) -> tuple[int, float, float]:
        """The fields in order, for JSON."""
        return self.count, self.total, self.squares
