"""Tasks of lm-evaluation-harness on a model of ours: found by name, run, and their numbers.

What lm-eval says while it works goes to stderr, so that stdout holds the result alone.
"""

import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, nearest, short
from meshtrain.evaluate.harness import model_class
from meshtrain.generate.opened import Opened

SHOWN = ("results", "groups", "n-shot", "versions", "n-samples")  # of what lm-eval tells, what --json has


def run_tasks(
    opened: Opened,
    names: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    rows: int = 8,
    longest: int | None = None,
) -> dict[str, Any]:
    """What lm-eval says of a model on its tasks, and on those whose YAML files are in `include`.

    `shots`: examples before a question (the task's own by default), `limit`: questions of a task, `chat`: by the model's template.
    ConfigError without lm-eval, and for a task that is not there or cannot be loaded.
    """
    model = model_class()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        own = None if include is None else TaskManager(include_path=str(include), include_defaults=False)
        # lm-eval's own tasks are thousands of files, which take long to go through
        if own is not None and set(names) <= set(own.all_tasks):
            manager = own
        else:
            manager = TaskManager(include_path=None if include is None else str(include))
        for name in names:
            # A pattern or a file is lm-eval's to judge.
            if name not in manager.all_tasks and not set(name) & set("*?[/"):
                where = f" in {short(include)} or" if include is not None else ""
                raise ConfigError(
                    f"there is no task {short(name)}{where} in lm-eval{nearest(name, manager.all_tasks) or '; lm-eval ls tasks lists them.'}"
                )
        return simple_evaluate(
            model(opened=opened, batch_size=rows, max_length=longest), tasks=list(names), num_fewshot=shots, limit=limit,
            task_manager=_Manager(manager), apply_chat_template=chat, log_samples=False,
        )  # fmt: skip


class _Manager:
    """A TaskManager whose tasks, which a dataset or a file of theirs may keep from loading, fail with a sentence."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def load(self, tasks: Any) -> Any:
        try:
            return self._manager.load(tasks)
        # datasets, requests and YAML each raise their own
        except Exception as error:
            raise ConfigError(
                f"the tasks {', '.join(map(short, tasks))} cannot be loaded ({short(str(error) or type(error).__name__)})."
            ) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def table(results: dict[str, Any]) -> str:
    """The tables that lm-eval prints itself."""
    from lm_eval.utils import make_table

    groups = make_table(results, "groups") if results.get("groups") else ""
    return "\n".join(filter(None, (make_table(results), groups)))
