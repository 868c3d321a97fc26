"""A run of two processes that is made up: rows as their hubs would hand them out, and the pages on which Prometheus
finds them.
"""

import math
import random
import threading
import time
from typing import Any

from meshtrain.telemetry.catalogue import METRICS
from meshtrain.telemetry.endpoint import Board, Endpoint

RATE = 1000.0  # tokens a second


class Run:
    """Takes steps from its context's begin to its end.

    `ill`: slow, short of all that it needs, its second rank late. `still`: no step, a loss of NaN.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(
            (m.name for m in METRICS if m.source == "step" and m.kind == "counter"), 0.0
        )
        self.boards = [
            Board(rank, f"n{rank}", "runs/made-up", self.totals, 30.0)
            for rank in range(2)
        ]
        self.endpoints = [Endpoint("127.0.0.1", 0, board) for board in self.boards]
        self.ill, self.still, self.step = False, False, 0
        self.free, self.sampled = 5e11, time.time()
        self._random, self._ending = random.Random(0), threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> "Run":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        for endpoint in self.endpoints:
            endpoint.close()

    def _live(self) -> None:
        last = time.time()
        while not self._ending.wait(0.1):
            now = time.time()
            if not self.still:
                self.step += 1
                self.totals["tokens"] += (RATE / 2 if self.ill else RATE) * (now - last)
            row = self._step_row()
            self.boards[0](row, "step")
            if now - self.sampled >= 0.4:
                self._sample(now - self.sampled)
                self.sampled = now
            last = now

    def _step_row(self) -> dict[str, Any]:
        loss = 4.0 if self.ill else math.nan if self.still else 2.0
        row: dict[str, Any] = {
            metric.name: 0.1 for metric in METRICS if metric.source == "step"
        }
        return row | {
            "step": self.step,
            "loss": loss + self._random.gauss(0, 0.02),
            "tokens_per_second": RATE / 2 if self.ill else RATE,
            "checkpoint_bytes": 1e12 if self.ill else 1e9,
            "mfu": 0.4,
        }

    def _sample(self, seconds: float) -> None:
        self.free = max(1e9, self.free - 3e10 * seconds) if self.ill else 5e11
        for rank in (1, 0):
            waiting = 0.3 if self.ill and rank else 0.9
            phases = {
                "data": 0.95 - waiting,
                "dispatch": 0.03,
                "log": 0.02,
                "wait": waiting,
            }
            full = 0.99 if self.ill else 0.5
            row: dict[str, Any] = {"rank": rank, "host": f"n{rank}"}
            for metric in METRICS:
                if metric.source == "process":
                    row[metric.name] = _labelled(
                        metric.labels, 100.0 if metric.unit == "bytes" else full
                    )
            row |= {
                "device_memory_used_bytes": {"0": 99.0 if self.ill else 50.0},
                "disk_free_bytes": self.free,
            }
            row |= {
                "phase_seconds": {
                    phase: share * seconds for phase, share in phases.items()
                },
                "disk_used_ratio": 0.7,
            }
            for board in self.boards[: 1 + rank]:
                board(row, "process")


def _labelled(labels: tuple[str, ...], value: float) -> Any:
    """A value as a row has it, with one value of each label."""
    return {"0": _labelled(labels[1:], value)} if labels else value
