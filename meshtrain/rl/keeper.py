"""The program of a child process that calls rewards: a keeper, and the worker that it forks.

    trainer ──calls──► worker: the user's functions, limited ──► what they start
       │    ◄─replies──   ▲                                          ▲
       └───► keeper ──────┴───────── kills both ─────────────────────┘

The keeper runs no code of the user's. A process whose parent has ended becomes a child of the keeper
(PR_SET_CHILD_SUBREAPER), which kills it. It kills the worker too, when the trainer asks for it or ends, however that
does. Neither imports JAX, NumPy or the trainer.
"""

import importlib
import json
import math
import os
import pickle
import reprlib
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from meshtrain.orphans import adopt_orphans, die_with

LARGEST = 1e30  # a reward that no sum takes out of float32
FILES = 256  # that are open at once
TASKS = 256  # processes and threads beside those of the system
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1}


class Spec(NamedTuple):
    """The functions of a child, and the limits of a call."""

    # Each function by its module's name, the path and the text of its file, or "", and its own name.
    functions: tuple[tuple[str, str, str, str], ...]
    seconds: float  # a call
    memory: int  # bytes
    # The last function is a class of episodes' environments
    has_environment: bool = False


class Reply(NamedTuple):
    """The outcome of a call."""

    kind: str | None  # of failure
    value: Any  # a float; of an environment a list of messages, or None
    how: str  # it failed


def keep(descriptor: int, trainer: int) -> None:
    """Starts the worker on a connection's descriptor and waits for its end, or for that of the trainer, by its process
    id. Then it ends as the worker did, and nothing is left of that.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # The kernel also sends it when the thread of the trainer that has started this process ends.
    die_with(trainer, signal.SIGUSR1)
    adopt_orphans()
    directory = tempfile.mkdtemp(prefix="meshtrain-reward-")
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        try:
            die_with(keeper)
            _work(Connection(descriptor), directory)
        finally:
            os._exit(1)
    os.close(descriptor)
    while True:
        _kill_children(worker)
        received = signal.sigtimedwait(SIGNALS, 1.0)
        ended, status = os.waitpid(worker, os.WNOHANG)
        if (
            ended
            or os.getppid() != trainer
            or (received and received.si_signo == signal.SIGTERM)
        ):
            break
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    if not ended:
        os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
    _kill_children()
    shutil.rmtree(directory, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _kill_children(spared: int = 0) -> None:
    """Kills the children of this process but one, and theirs, which become its own."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while strays := [
        pid for pid in map(int, children.read_text().split()) if pid != spared
    ]:
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
        for pid in strays:
            os.waitpid(pid, 0)


def _work(trainer: Connection, directory: str) -> None:
    """Loads the functions, then answers calls: the worker's whole life."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    spec: Spec = pickle.loads(trainer.recv_bytes())
    # The first one does nothing.
    functions: list[Callable[..., Any]] = [float]
    reply = call(_load, (spec, functions), spec.functions[-1][1], BaseException)
    environment = len(spec.functions) if spec.has_environment else 0
    _limit(spec.memory)
    me = os.getpid()
    # A function may return in a process that it has forked, too
    while os.getpid() == me:
        trainer.send_bytes(json.dumps(reply).encode())
        number, *arguments = pickle.loads(trainer.recv_bytes())
        _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + spec.seconds) + 1)
        file = spec.functions[number - 1][1]
        if number and number == environment:
            reply = call(
                _step, (functions[number], *arguments), file, BaseException, _messages
            )
        else:
            reply = call(functions[number], arguments, file, BaseException)


def _load(spec: Spec, functions: list[Callable[..., Any]]) -> float:
    for name, path, text, attribute in spec.functions:
        if path and name not in sys.modules:
            module = ModuleType(name)
            module.__file__ = path
            sys.modules[name] = module
            exec(compile(text, path, "exec"), vars(module))
        functions.append(getattr(importlib.import_module(name), attribute))
    return 0.0


def _limit(memory: int) -> None:
    """Limits what the process may take from here on. Root has no limit on tasks."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    tasks = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    _lower(resource.RLIMIT_NPROC, tasks + TASKS)
    _lower(resource.RLIMIT_FSIZE, memory)
    _lower(resource.RLIMIT_NOFILE, FILES)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, most: int) -> None:
    hard = resource.getrlimit(limit)[1]  # -1: none
    resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))


def _step(environment: Callable[..., Any], messages: Any, record: Any) -> Any:
    return environment(record).step(messages)


def _number(value: Any) -> float:
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise ValueError
    return float(value)


def _messages(value: Any) -> Any:
    if value is not None and not (value and all(message["role"] for message in value)):
        raise ValueError
    return json.loads(json.dumps(value))


def call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    file: str = "",
    caught: type[BaseException] = Exception,
    read: Callable[[Any], Any] = _number,
) -> Reply:
    """Returns what becomes of a call of a reward; `file`: where it is written; `read`: the value of what it returns."""
    try:
        value = function(*arguments)
        with suppress(TypeError, ValueError, OverflowError, KeyError):
            return Reply(None, read(value), "")
        kind = "not_finite" if read is _number else "not_messages"
        return Reply(kind, 0.0, f"returned {reprlib.repr(value)}")
    except MemoryError:
        return Reply("memory", 0.0, "took more memory than it may")
    except caught as error:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == file]
        where = f" in line {lines[-1]}" if lines else ""
        what = traceback.format_exception_only(error)[-1].strip()
        return Reply("raised", 0.0, f"raised {what[:200]}{where}")
