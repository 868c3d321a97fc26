"""Writes the files of a run beside its checkpoints, config.yaml and metrics.jsonl, and sees that they stay there."""

import os
from pathlib import Path

from meshtrain.config import Config, to_yaml
from meshtrain.config.check import importing
from meshtrain.errors import ConfigError, refusal, say
from meshtrain.files import write_atomically
from meshtrain.run.directory import ANSWERS, CONFIG, METRICS
from meshtrain.run.hooks import Row, RunHook
from meshtrain.run.lock import LOCK, RunLock
from meshtrain.run.processes import RunFailure, first_decides
from meshtrain.run.rows import MetricsFile, trim_metrics


class RunRecord(RunHook):
    """Writes on the first process, and nothing on the others. `start`: the step after which the run goes on.

    A run directory, or a file of these, that is removed, renamed or replaced while the run goes on is made again, with
    a word: nothing is written where nobody would find it. ConfigError if it cannot be begun; RunFailure if another run
    is in the directory by then.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        start: int,
        lock: RunLock | None,
    ) -> None:
        self.directory = directory
        self.start = start
        self._lock = lock
        self._config = to_yaml(config).encode()
        self._imports = config.run.imports
        self._metrics: MetricsFile | None = None
        self._said_missing: list[str] = []
        first_decides(self._begin)

    def after_metrics(self, row: Row, due: bool) -> None:
        if self._metrics is None or not due:
            return
        missing = self._missing_files()
        refused = self._make_again(missing) if missing else None
        self._metrics.write(row)
        if missing and missing != self._said_missing:
            self._say_gone(missing, refused or self._metrics.refused)
        self._said_missing = missing

    def finish(self) -> bool:
        """Writes the rows that wait, and returns whether every row is in the file."""
        return self._metrics is None or self._metrics.finish()

    def close(self) -> None:
        """Says if rows are lost."""
        if self._metrics is not None:
            self._metrics.close()

    def _begin(self) -> None:
        for name in (METRICS, ANSWERS):
            trim_metrics(self.directory / name, self.start)
        write_atomically(self.directory / CONFIG, self._config)
        if self._imports:
            importing().keep(self._imports, self.directory)
        self._metrics = MetricsFile(self.directory / METRICS)

    def _missing_files(self) -> list[str]:
        there = {
            LOCK: self._lock is None or self._lock.is_there(),
            CONFIG: os.path.exists(self.directory / CONFIG),
        }
        there[METRICS] = self._metrics is not None and self._metrics.is_there()
        return [name for name, is_there in there.items() if not is_there]

    def _make_again(self, missing: list[str]) -> OSError | None:
        """Makes all but the rows, which are written again with the next one; returns what the system refused."""
        try:
            if self._lock is not None and LOCK in missing:
                self._lock.take_again()
            if CONFIG in missing:
                write_atomically(self.directory / CONFIG, self._config)
        except ConfigError as another:
            raise RunFailure(
                f"this run no longer has its directory to itself: {another}"
            ) from None
        except OSError as error:
            return error
        return None

    def _say_gone(self, missing: list[str], refused: OSError | None) -> None:
        end = "are made again" + (
            "; checkpoints that went with them are not" if LOCK in missing else ""
        )
        if refused is not None:
            end = f"cannot be made again yet: {refusal(refused)}"
        say(
            f"{' and '.join(missing)} of {self.directory} went away while the run goes on, and {end}."
        )
