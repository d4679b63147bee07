"""The independent answer for a gradient: central differences in float64 numpy."""

from collections.abc import Callable

import numpy as np


def numeric_gradient(fn: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """Gradient of a float64 numpy function of one array, entry by entry."""
    x = np.asarray(x, np.float64)
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-6
        gradient[index] = (fn(x + step) - fn(x - step)) / 2e-6
    return gradient
