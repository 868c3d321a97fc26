"""Batches ahead of time: a thread reads and places the next ones while the accelerator computes.

Free of what a batch holds: any object with `batch(k, rows)` will do.

Grain is not used. On the same rows and two cores, its plain pipeline (shuffle, batch, 16 reading threads) delivered
0.29 of our rate at 5 times our processor time. Its packing delivered 0.07 (21 November 2026). Its packing and bucketing
are also iterators: their state is more than the one integer k with which a run goes on with any number of processes.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

Batch = dict[str, np.ndarray]
Part = tuple[slice, np.ndarray | None]  # rows, and places of a row (None: all)


class Batches(Protocol):
    """A global order of batches: `batch(k, rows)` is a pure function of k."""

    def batch(
        self, k: int, rows: slice = slice(None), columns: np.ndarray | None = None
    ) -> Batch: ...

    def batch_shape(self, k: int) -> tuple[int, ...]: ...


class Loader:
    """Iterator of (k, put(batch k)) for k = start, start + 1, ...: `depth` batches lie ready, and one is in the making.

    part: from the shape of a batch to this process's part of it.
    put: host arrays to what the step takes, e.g. onto the devices; it runs on the thread.
    waited: seconds that `next` has waited for data so far.
    """

    def __init__(
        self,
        batches: Batches,
        start: int = 0,
        part: Callable[[tuple[int, ...]], Part] = lambda shape: (slice(None), None),
        put: Callable[[Batch], Any] = lambda batch: batch,
        depth: int = 2,
    ) -> None:
        self.waited = 0.0
        self._batches = batches
        self._part = part
        self._put = put
        self._ready: queue.Queue[tuple[int, Any, BaseException | None]]
        self._ready = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(start,), name="meshtrain-data", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._closed.is_set():
            raise StopIteration
        began = time.perf_counter()
        k, batch, error = self._ready.get()
        self.waited += time.perf_counter() - began
        if error is not None:
            self.close()
            raise error
        return k, batch

    def next_batch(self, taken: int, state: Any) -> Any:
        """Returns the next batch, which no state of the model changes."""
        return next(self)[1]

    def close(self) -> None:
        """Stops the thread; what it had read ahead is dropped."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                # Makes room for a thread that waits in put.
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _fill(self, k: int) -> None:
        while not self._closed.is_set():
            try:
                part = self._part(self._batches.batch_shape(k))
                self._ready.put((k, self._put(self._batches.batch(k, *part)), None))
            # Handed to the reader, who raises it.
            except BaseException as error:
                self._ready.put((k, None, error))
                return
            k += 1
