"""Does to a training process what it was asked to inject (`survive.inject`), at the moments at which the loop calls."""

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint.steps import ARRAYS, WRITING, committed_in
from meshtrain.errors import ConfigError, say
from meshtrain.inputs import input_name, inputs
from meshtrain.run.directory import CHECKPOINTS
from meshtrain.survive.beat import Beat
from meshtrain.survive.inject import Moment, Request, claimed, parse, requests

Given = tuple[Any, Any]  # the state and the batch of the step that comes
Tree = Any

LOOK_EVERY = 1.0  # seconds between two looks for requests
SHORTEST_NAP = 0.05  # seconds
TOO_MANY = 1 << 44  # floats, 64 TiB
FLIPPED_BIT = 20  # of a float32: high in the mantissa, so that the number stays one


class Injector:
    """The faults of this process; none without a supervisor. `asked`: survive.inject of the config."""

    def __init__(self, beat: Beat, asked: Iterable[str]) -> None:
        self._beat, self._pending, self._known = beat, list[Request](), set[str]()
        self._nap: float | None = None
        self._stuck = threading.Event()  # for the thread that reads data
        if beat.supervised is None:
            return
        self._local, self._rank = beat.supervised.local, beat.supervised.rank
        self._requests, self._done = beat.supervised.survive / "inject", beat.supervised.survive / "injected"
        self._checkpoints = beat.supervised.survive.parent / CHECKPOINTS
        self._take(requests(asked))
        # A thread of its own, since the disk may hang. What is asked for already is due at once.
        looked = threading.Event()
        threading.Thread(target=self._look, args=(looked,), name="meshtrain-inject", daemon=True).start()
        looked.wait(LOOK_EVERY)

    def at(self, moment: Moment, step: int | None = None, given: Given = (None, None)) -> Given:
        """Does what is due at this moment after `step` steps, by default those of the newest checkpoint; what the step is to be given."""
        for request in list(self._pending):
            if request.kind.moment != moment:
                continue
            taken = max(committed_in(self._checkpoints), default=0) if step is None else step
            if taken >= request.step and self._ready(request) and self._is_mine_to_do(request):
                if request.kind.name != "slow" or self._nap is None:
                    say(f"{request.name}: {request.kind.does}, injected into rank {self._rank} after step {taken}.")
                given = _DEEDS[request.kind.name](self, taken, given) or given
        return given

    def in_loader(self) -> None:
        """On the thread that reads data."""
        while self._stuck.is_set():
            time.sleep(1)

    def _ready(self, request: Request) -> bool:
        """A checkpoint can be hurt, or be in the way of the end of a restore, if there is one."""
        return request.kind.name not in ("damage", "kill-restore") or bool(committed_in(self._checkpoints))

    def _is_mine_to_do(self, request: Request) -> bool:
        """Takes a request off the list; whether no process has done it before."""
        if request.kind.name == "slow":
            return self._nap is not None or self._beat.pace is not None
        self._pending.remove(request)
        return claimed(self._done, request)

    def _take(self, found: Iterable[Request]) -> None:
        for request in found:
            mine = request.kind.where == "trainer" and request.rank == self._rank
            if mine and request.name not in self._known:
                self._known.add(request.name)
                self._pending.append(request)

    def _look(self, looked: threading.Event) -> None:
        """Requests of `survive inject`: files named by them."""
        refused: set[str] = set()
        while True:
            names: list[str] = []
            # made by the first request
            with contextlib.suppress(OSError):
                # One that begins with a dot is on its way there.
                names = sorted(name for name in os.listdir(self._requests) if not name.startswith("."))
            for name in names:
                if name in refused:
                    continue
                try:
                    self._take(parse(name, str(self._requests)))
                except ConfigError as error:
                    refused.add(name)
                    say(error)
            looked.set()
            time.sleep(LOOK_EVERY)

    # --- what is done

    def _kill(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _segv(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _abort(self, *_: object) -> None:
        os.abort()

    def _preempt(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _freeze(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _exhaust(self, *_: object) -> None:
        jax.block_until_ready(jax.jit(lambda: jnp.zeros((TOO_MANY,), jnp.float32))())

    def _raise(self, *_: object) -> NoReturn:
        raise RuntimeError("an exception that was injected")

    def _kill_in_save(self, step: int, _: Given) -> None:
        """On a thread: as soon as the save that begins now has a directory."""

        def wait() -> None:
            while not any(self._checkpoints.glob(f"*{WRITING}")):
                time.sleep(0.0005)
            self._kill()

        threading.Thread(target=wait, daemon=True).start()

    def _sleep(self, *_: object) -> NoReturn:
        while True:
            time.sleep(3600)

    def _stick_loader(self, *_: object) -> None:
        self._stuck.set()

    def _hold_gil(self, *_: object) -> None:
        nothing = os.pipe()[0]
        # PyDLL, unlike CDLL, keeps the lock during a call. A read goes on after the signal that asks for stacks; a sleep would end.
        ctypes.PyDLL(None).read(nothing, ctypes.create_string_buffer(1), 1)

    def _sleep_in_kernel(self, *_: object) -> None:
        """A vfork's parent sleeps until the child execs; this child first opens a pipe that nobody writes to.

        Another process lets the child go when this one has ended.
        """
        fifo = Path(tempfile.mkdtemp(dir=self._local)) / "nobody"
        os.mkfifo(fifo, 0o600)
        lets_go = 'while kill -0 "$1" 2>/dev/null; do sleep 0.2; done; : <> "$2"; rm -r "${2%/*}"'
        subprocess.Popen(["sh", "-c", lets_go, "sh", str(os.getpid()), str(fifo)])
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, str(fifo), os.O_RDONLY, 0)])

    def _never_ready(self, _: int, given: Given) -> Given:
        """The batch, which the devices wait for."""
        state, batch = given
        self._beat.phase("wait")  # where the other ranks are by then; a CPU may wait in the call itself

        def never(x: np.ndarray) -> np.ndarray:
            self._sleep()

        def gate(x: jax.Array) -> jax.Array:
            return jax.jit(lambda y: jax.pure_callback(never, jax.ShapeDtypeStruct(y.shape, y.dtype), y))(x)

        read = inputs(batch)
        parts = [gate(shard.data) for shard in read.addressable_shards]
        held = jax.make_array_from_single_device_arrays(read.shape, read.sharding, parts)
        return state, {**batch, input_name(batch): held}

    def _poison(self, _: int, given: Given) -> Given:
        """NaN in a weight of a layer, on the first of this rank's devices."""
        state, batch = given

        def nan(part: np.ndarray) -> None:
            part.flat[0] = np.nan

        # what lies there for all layers, [layers, in, out]: a matrix, of which every token needs each number
        return _changed_at(state, lambda leaf: leaf.ndim >= 3, nan), batch

    def _flip(self, _: int, given: Given) -> Given:
        """A bit of a parameter that most other devices have too, on one of this rank's devices."""
        state, batch = given
        most = max(map(_copies, jax.tree.leaves(state.params)))

        def flip(part: np.ndarray) -> None:
            part.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << FLIPPED_BIT)

        return _changed_at(state, lambda leaf: _copies(leaf) == most, flip), batch

    def _drag(self, *_: object) -> None:
        if self._nap is None:
            self._nap = max((self._beat.pace or 0.0) / 2, SHORTEST_NAP)
        time.sleep(self._nap)

    def _damage(self, *_: object) -> None:
        newest = self._checkpoints / str(max(committed_in(self._checkpoints)))
        largest = max((p for p in (newest / ARRAYS).rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p))
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        self._kill()


def _copies(leaf: jax.Array) -> int:
    """The devices that hold the same part of an array."""
    return leaf.sharding.num_devices // len({str(at) for at in leaf.sharding.devices_indices_map(leaf.shape).values()})


def _changed_at(state: Any, chosen: Callable[[jax.Array], bool], change: Callable[[np.ndarray], None]) -> Any:
    """The state with the first chosen parameter, or the first of all, changed on the first of this process's devices alone."""
    leaves, tree = jax.tree.flatten(state.params)
    at = next((i for i, leaf in enumerate(leaves) if chosen(leaf)), 0)
    leaf = leaves[at]
    parts = [np.array(shard.data) for shard in leaf.addressable_shards]
    change(parts[0])
    placed = [jax.device_put(part, shard.device) for part, shard in zip(parts, leaf.addressable_shards, strict=True)]
    leaves[at] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)
    return state._replace(params=jax.tree.unflatten(tree, leaves))


_DEEDS: dict[str, Callable[[Injector, int, Given], Given | None]] = {
    "kill": Injector._kill,
    "segv": Injector._segv,
    "abort": Injector._abort,
    "out-of-memory": Injector._exhaust,
    "error": Injector._raise,
    "kill-compile": Injector._kill,
    "kill-restore": Injector._kill,
    "kill-save": Injector._kill_in_save,
    "kill-two": Injector._kill,
    "kill-forming": Injector._kill,
    "frozen": Injector._freeze,
    "asleep": Injector._sleep,
    "loader": Injector._stick_loader,
    "gil": Injector._hold_gil,
    "d-state": Injector._sleep_in_kernel,
    "collective": Injector._never_ready,
    "nan": Injector._poison,
    "nan-always": Injector._poison,
    "bit-flip": Injector._flip,
    "slow": Injector._drag,
    "damage": Injector._damage,
    "crash-loop": Injector._kill,
    "preempt": Injector._preempt,
}
