"""The loader: in order, ahead of time, its failures those of the reader, its thread gone when closed."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from meshtrain.data.loader import Batch, Loader


class Squares:
    """Batches of anything: no text."""

    def __init__(self, act: Callable[[int], None] = lambda k: None) -> None:
        self.act, self.made = act, 0

    def batch(
        self, k: int, rows: slice = slice(None), columns: np.ndarray | None = None
    ) -> Batch:
        self.act(k)
        self.made = k + 1
        return {"image": np.full((k % 3 + 2, 4, 4, 3), k * k)[rows]}

    def batch_shape(self, k: int) -> tuple[int, ...]:
        return (k % 3 + 2, 4, 4, 3)


def test_batches_come_in_order_from_where_it_starts_and_through_put():
    total = lambda batch: batch["image"].sum() / 96
    loader = Loader(
        Squares(), start=3, part=lambda shape: (slice(0, 2), None), put=total
    )
    assert [next(loader) for _ in range(4)] == [(3, 9), (4, 16), (5, 25), (6, 36)]
    loader.close()


def test_a_part_may_depend_on_how_large_a_batch_is():
    loader = Loader(
        Squares(), part=lambda shape: (slice(shape[0] // 2, shape[0]), None)
    )
    assert [next(loader)[1]["image"].shape[0] for _ in range(3)] == [1, 2, 2]
    loader.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_reads_ahead_as_deep_as_asked_and_no_deeper(depth):
    source = Squares()
    loader = Loader(source, depth=depth)
    deadline = time.monotonic() + 10
    while source.made < depth + 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert source.made == depth + 1
    loader.close()


def test_time_waited_is_counted_only_when_the_data_is_late():
    slow = Loader(Squares(lambda k: time.sleep(0.05)))
    for _ in range(4):
        next(slow)
    assert slow.waited > 0.15
    slow.close()
    ready = Loader(Squares(), depth=4)
    time.sleep(0.3)
    for _ in range(4):
        next(ready)
    assert ready.waited < slow.waited / 3
    ready.close()


def test_an_error_in_the_thread_is_raised_where_the_batch_is_asked_for():
    def fail(k: int) -> None:
        if k == 2:
            raise OSError("the disk is gone")

    loader = Loader(Squares(fail))
    assert [next(loader)[0], next(loader)[0]] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_closing_ends_the_thread_at_once_wherever_it_is():
    before = threading.active_count()
    loaders = [Loader(Squares(), depth=1), Loader(Squares(lambda k: time.sleep(0.02)))]
    next(loaders[0])
    for loader in loaders:
        loader.close()
        loader.close()
    assert threading.active_count() == before
    assert list(loaders[0]) == []
