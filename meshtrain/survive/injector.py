"""Injects faults on purpose (`survive.inject`, `survive inject`): into a training process at the moments at which its
loop calls, and into a node by its supervisor. The kinds: `meshtrain.config.inject`. Loads no JAX before a fault needs
it.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from meshtrain.checkpoint.steps import ARRAYS, WRITING, committed_in
from meshtrain.config.inject import FaultRequest, Moment, claimed, parse, requests
from meshtrain.errors import ConfigError, say
from meshtrain.inputs import input_name, inputs
from meshtrain.run.directory import CHECKPOINTS
from meshtrain.survive import console
from meshtrain.survive.heartbeat import Heartbeat

if TYPE_CHECKING:
    import jax

    from meshtrain.config import Config
    from meshtrain.survive.child import TrainingProcess
    from meshtrain.survive.leader import Leader
    from meshtrain.survive.records import Node, SupervisorOptions
    from meshtrain.survive.store import Store
    from meshtrain.survive.view import View

StepInputs = tuple[Any, Any]  # the state and the batch of the step that comes

LOOK_EVERY = 1.0  # seconds between two looks for requests
SHORTEST_NAP = 0.05  # seconds
TOO_MANY = 1 << 44  # floats, 64 TiB
FLIPPED_BIT = 20  # of a float32: high in the mantissa, so that the number stays one


class Injector:
    """The faults of this training process; none without a supervisor. `asked`: survive.inject of the config."""

    def __init__(self, heartbeat: Heartbeat, asked: Iterable[str]) -> None:
        self.heartbeat = heartbeat
        self._pending = list[FaultRequest]()
        self._known = set[str]()
        self.nap = 0.0  # seconds that each step takes more: the fault `slow`
        self.stuck = threading.Event()  # for the thread that reads data
        if heartbeat.supervised is None:
            return
        self._rank = heartbeat.supervised.rank
        survive = heartbeat.supervised.survive
        self._requests = survive / "inject"
        self._done = survive / "injected"
        self.checkpoints = survive.parent / CHECKPOINTS
        self._take(requests(asked))
        # A thread of its own, since the disk may hang. What is asked for already is due at once.
        looked = threading.Event()
        threading.Thread(
            target=self._look, args=(looked,), name="meshtrain-inject", daemon=True
        ).start()
        looked.wait(LOOK_EVERY)

    def at(
        self,
        moment: Moment,
        step: int | None = None,
        step_inputs: StepInputs = (None, None),
    ) -> StepInputs:
        """Injects what is due at this moment after `step` steps, by default those of the newest checkpoint; returns the
        step's inputs.
        """
        for request in [r for r in self._pending if r.kind.moment == moment]:
            taken = self.newest_checkpoint() or 0 if step is None else step
            if taken < request.step or not self._is_possible(request.kind.name):
                continue
            self._pending.remove(request)
            if claimed(self._done, request):
                say(
                    f"{request.name}: {request.kind.does}, injected into rank {self._rank} after step {taken}."
                )
                step_inputs = (
                    _FAULTS[request.kind.name](self, step_inputs) or step_inputs
                )
        if self.nap and moment == "dispatch":
            time.sleep(self.nap)
        return step_inputs

    def in_loader(self) -> None:
        """Holds the thread that reads data, if it is to be stuck."""
        while self.stuck.is_set():
            time.sleep(1)

    def newest_checkpoint(self) -> int | None:
        return max(committed_in(self.checkpoints), default=None)

    def _is_possible(self, kind: str) -> bool:
        """Returns whether there is a checkpoint to damage or to restore, and a step of whose time half is known."""
        if kind == "slow":
            return self.heartbeat.pace is not None
        return (
            kind not in ("damage", "kill-restore")
            or self.newest_checkpoint() is not None
        )

    def _take(self, asked: Iterable[FaultRequest]) -> None:
        for request in asked:
            mine = request.kind.where == "trainer" and request.rank == self._rank
            if mine and request.name not in self._known:
                self._known.add(request.name)
                self._pending.append(request)

    def _look(self, looked: threading.Event) -> None:
        """Takes requests of `survive inject`: files named by them, in a directory that the first one makes."""
        refused: set[str] = set()
        while True:
            names: list[str] = []
            with contextlib.suppress(OSError):
                # A name that begins with a dot is a file still being written.
                names = [
                    name
                    for name in sorted(os.listdir(self._requests))
                    if not name.startswith(".")
                ]
            for name in names:
                try:
                    self._take(parse(name, str(self._requests)))
                except ConfigError as error:
                    if name not in refused:
                        refused.add(name)
                        say(error)
            looked.set()
            time.sleep(LOOK_EVERY)


# --- the faults of a training process


def _exhaust(*_: object) -> None:
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jax.jit(lambda: jnp.zeros((TOO_MANY,), jnp.float32))())


def _kill_in_save(injector: Injector, _: StepInputs) -> None:
    """Kills the process, on a thread, as soon as the save that begins now has a directory."""

    def wait() -> None:
        while not any(injector.checkpoints.glob(f"*{WRITING}")):
            time.sleep(0.0005)
        _kill()

    threading.Thread(target=wait, daemon=True).start()


def _sleep(*_: object) -> NoReturn:
    while True:
        time.sleep(3600)


def _hold_gil(*_: object) -> None:
    nothing = os.pipe()[0]
    # PyDLL, unlike CDLL, keeps the lock during a call. A read goes on after the signal that asks for stacks; a sleep
    # would end.
    ctypes.PyDLL(None).read(nothing, ctypes.create_string_buffer(1), 1)


def _sleep_in_kernel(injector: Injector, _: StepInputs) -> None:
    """A vfork's parent sleeps until the child execs; this child first opens a pipe that nobody writes to.

    Another process lets the child go when this one has ended.
    """
    assert injector.heartbeat.supervised is not None
    fifo = Path(tempfile.mkdtemp(dir=injector.heartbeat.supervised.local)) / "nobody"
    os.mkfifo(fifo, 0o600)
    lets_go = (
        'while kill -0 "$1" 2>/dev/null; do sleep 0.2; done; : <> "$2"; rm -r "${2%/*}"'
    )
    subprocess.Popen(["sh", "-c", lets_go, "sh", str(os.getpid()), str(fifo)])
    os.posix_spawn(
        "/bin/true",
        ["true"],
        {},
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, str(fifo), os.O_RDONLY, 0)],
    )


def _never_ready(injector: Injector, step_inputs: StepInputs) -> StepInputs:
    import jax

    state, batch = step_inputs
    injector.heartbeat.phase(
        "wait"
    )  # where the other ranks are by then; a CPU may wait in the call itself

    def gate(x: jax.Array) -> jax.Array:
        return jax.jit(
            lambda y: jax.pure_callback(
                _sleep, jax.ShapeDtypeStruct(y.shape, y.dtype), y
            )
        )(x)

    read = inputs(batch)
    parts = [gate(shard.data) for shard in read.addressable_shards]
    gated = jax.make_array_from_single_device_arrays(read.shape, read.sharding, parts)
    return state, {**batch, input_name(batch): gated}


def _poison(_: Injector, step_inputs: StepInputs) -> StepInputs:
    state, batch = step_inputs

    def nan(part: np.ndarray) -> None:
        part.flat[0] = np.nan

    # what lies there for all layers, [layers, in, out]: a matrix, of which every token needs each number
    return _changed_at(state, lambda leaf: leaf.ndim >= 3, nan), batch


def _flip(_: Injector, step_inputs: StepInputs) -> StepInputs:
    import jax

    state, batch = step_inputs
    most = max(map(_copies, jax.tree.leaves(state.params)))

    def flip(part: np.ndarray) -> None:
        part.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << FLIPPED_BIT)

    return _changed_at(state, lambda leaf: _copies(leaf) == most, flip), batch


def _copies(leaf: "jax.Array") -> int:
    return leaf.sharding.num_devices // len(
        {str(at) for at in leaf.sharding.devices_indices_map(leaf.shape).values()}
    )


def _changed_at(
    state: Any,
    chosen: Callable[["jax.Array"], bool],
    change: Callable[[np.ndarray], None],
) -> Any:
    """Returns the state with the first chosen parameter, or the first of all, changed on the first of this process's
    devices alone.
    """
    import jax

    leaves, tree = jax.tree.flatten(state.params)
    at = next((i for i, leaf in enumerate(leaves) if chosen(leaf)), 0)
    leaf = leaves[at]
    parts = [np.array(shard.data) for shard in leaf.addressable_shards]
    change(parts[0])
    placed = [
        jax.device_put(part, shard.device)
        for part, shard in zip(parts, leaf.addressable_shards, strict=True)
    ]
    leaves[at] = jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, placed
    )
    return state._replace(params=jax.tree.unflatten(tree, leaves))


def _drag(injector: Injector, _: StepInputs) -> None:
    injector.nap += max((injector.heartbeat.pace or 0.0) / 2, SHORTEST_NAP)


def _damage(injector: Injector, _: StepInputs) -> None:
    arrays = injector.checkpoints / str(injector.newest_checkpoint()) / ARRAYS
    largest = max(
        (p for p in arrays.rglob("*") if p.is_file()),
        key=lambda p: (p.stat().st_size, p),
    )
    with largest.open("r+b") as file:
        middle = largest.stat().st_size // 2
        byte = os.pread(file.fileno(), 1, middle)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), middle)
    _kill()


def _raise(*_: object) -> NoReturn:
    raise RuntimeError("an exception that was injected")


def _send(number: int) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


_kill = _send(signal.SIGKILL)

_FAULTS: dict[str, Callable[[Injector, StepInputs], StepInputs | None]] = {
    **dict.fromkeys(
        (
            "kill",
            "kill-compile",
            "kill-restore",
            "kill-two",
            "kill-forming",
            "crash-loop",
        ),
        _kill,
    ),
    "segv": _send(signal.SIGSEGV),
    "abort": lambda *_: os.abort(),
    "preempt": _send(signal.SIGTERM),
    "frozen": _send(signal.SIGSTOP),
    "out-of-memory": _exhaust,
    "error": _raise,
    "kill-save": _kill_in_save,
    "asleep": _sleep,
    "loader": lambda injector, _: injector.stuck.set(),
    "gil": _hold_gil,
    "d-state": _sleep_in_kernel,
    "collective": _never_ready,
    "nan": _poison,
    "nan-always": _poison,
    "bit-flip": _flip,
    "slow": _drag,
    "damage": _damage,
}


# --- the faults of a node


class InjectedNode(Protocol):
    """Names what faults of a node read and change of its supervisor."""

    config: "Config"
    options: "SupervisorOptions"
    store: "Store"
    view: "View"
    leader: "Leader"
    node: "Node"
    child: "TrainingProcess | None"


class NodeInjector:
    """The faults of one supervisor's node.

    `node-returns` is played: the process is killed, the node falls silent for twice survive.node_timeout, and then is
    there as a new one.
    """

    def __init__(self, supervisor: InjectedNode) -> None:
        self.supervisor = supervisor
        self.done = supervisor.store.root / "injected"
        self.requests = {r.name: r for r in requests(supervisor.config.survive.inject)}
        self._looked = -LOOK_EVERY
        self._silent_until: float | None = None
        self._taken: socket.socket | None = None  # the port that somebody else has

    def look(self, now: float) -> None:
        """Injects what is due; may not come back."""
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            for text in self.supervisor.store.asked():
                # The training processes report what is no request.
                with contextlib.suppress(ConfigError):
                    self.requests |= {
                        r.name: r
                        for r in parse(text)
                        if not (self.done / r.name).exists()
                    }
        node = self.supervisor.node
        if node.rank is None or node.end is not None:
            return
        for request in list(self.requests.values()):
            kind = request.kind
            rank = node.rank
            if (
                kind.where != "supervisor"
                or kind.name == "port-taken"
                or rank.step < request.step
            ):
                continue
            if kind.name == "leader-lost":
                is_here = self.supervisor.leader.leads
            else:
                is_here = rank.number == (
                    0 if kind.name == "coordinator-lost" else request.rank
                )
            if is_here and self._claims(request):
                self._inject(request, now)

    def is_silent(self, now: float) -> bool:
        """Returns whether the node is to be taken for gone; at the end of that it is a new one."""
        if self._silent_until is not None and now >= self._silent_until:
            self._silent_until = None
            supervisor = self.supervisor
            identity = uuid.uuid4().hex
            supervisor.node = replace(
                supervisor.node,
                incarnation=identity,
                state="idle",
                generation=0,
                acked=0,
                rank=None,
                end=None,
            )
            supervisor.store.log(
                "join", incarnation=identity, host=supervisor.node.host, pid=os.getpid()
            )
        return self._silent_until is not None

    def port(self, free: int) -> int:
        """Returns the port that this node publishes: one that is taken, where that is asked for."""
        view = self.supervisor.view
        node = self.supervisor.node
        for request in list(self.requests.values()):
            due = request.kind.name == "port-taken" and (
                view.plan is None or (view.plan.step or 0) >= request.step
            )
            if due and view.is_first(node) and self._claims(request):
                self._taken = socket.create_server((node.address, free))
        return free

    def _claims(self, request: FaultRequest) -> bool:
        del self.requests[request.name]
        return claimed(self.done, request)

    def _inject(self, request: FaultRequest, now: float) -> None:
        supervisor = self.supervisor
        name = request.kind.name
        child = self.supervisor.child
        console.report(
            f"{request.name}: {request.kind.does}, injected into {supervisor.node.name}."
        )
        console.finish()
        if name == "supervisor-frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if name == "store-lost":
            supervisor.store.lost = True
            return
        if child is not None:
            os.killpg(child.process.pid, signal.SIGKILL)
        if name != "node-returns":
            os.kill(os.getpid(), signal.SIGKILL)
        if child is not None:
            child.process.wait()
            child.close()
        supervisor.child = None
        self._silent_until = now + 2 * supervisor.options.node_timeout
