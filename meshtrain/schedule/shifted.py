"""What is done a slot off, so that it has a whole slot to travel in: in the tick before, or after, among those with such a slot."""

from typing import Any

import numpy as np


def one_earlier(array: np.ndarray, ticks: np.ndarray, nothing: Any) -> np.ndarray:
    """What is done for each of `ticks` in the one before it among them: `array` [all ticks, ..], `nothing` in all others."""
    found = np.full_like(array, nothing)
    found[ticks[:-1]] = array[ticks[1:]]
    return found


def one_later(array: np.ndarray, ticks: np.ndarray, nothing: Any) -> np.ndarray:
    """The same of what is done for each of `ticks` in the one after it among them."""
    found = np.full_like(array, nothing)
    found[ticks[1:]] = array[ticks[:-1]]
    return found
