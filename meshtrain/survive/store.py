"""The only thing that supervisors share: a directory that every node can read and write.

    RUN/survive/
      plans/000012.json    a decision each; its number is taken by link(), which one of several leaders can do
      nodes/NAME.json      a node's record; of one size and rewritten in place, so that a full disk does not matter
      nodes/NAME.config    its config, for a node that has another
      events.NAME.jsonl    what happened, as that node saw it
      gen-3/               config, output, stacks and faults of the processes of generation 3
      inject/, injected/   faults asked for, and done

Another store needs the same operations: `publish`, `nodes`, `publish_config`, `read_config`, `plans`, `propose`, `log`,
`generation`; a compare-and-swap in one of them.
"""

import contextlib
import errno
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Container
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, refusal
from meshtrain.files import write_atomically
from meshtrain.survive.records import LARGEST, NAME, Node, RestartPlan, decode, encode

SURVIVE = "survive"
RECORD = 4096  # bytes of a node's record
MOST_PENDING = 1 << 20  # bytes of events that wait for a disk
PLAN = re.compile(r"\d{6,18}\.json", re.ASCII)
# What stands in the place of a record and is none: nothing, a directory, a link, a pipe.
NO_RECORD = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.EAGAIN, errno.ENXIO)


class Store:
    """The directory `RUN/survive` as the node `name` uses it.

    OSError where the system refuses; ConfigError if others may write there.
    """

    def __init__(self, run: Path, name: str) -> None:
        self.root = run / SURVIVE
        self.name = name
        self._plans: dict[int, RestartPlan] = {}
        self.next_number = 1  # of a plan, as far as this node has seen
        self._pending = b""  # events
        self._published = ""  # the incarnation that its record is of
        # The fault `store-lost`: nothing of it can be reached from here
        self.lost = False
        refuse_unsafe(run)
        for part in ("", "plans", "nodes", "inject", "injected"):
            with contextlib.suppress(FileExistsError):
                (self.root / part).mkdir(mode=0o700)
            refuse_unsafe(self.root / part, follow=False)
        self._directory = self.root.stat().st_ino

    # --- nodes

    def publish(self, node: Node) -> None:
        """Writes this node's record; ConfigError if another supervisor has written one under its name since the last
        time.
        """
        self._reach()
        descriptor = opened(
            self.root / "nodes" / f"{self.name}.json", os.O_RDWR | os.O_CREAT
        )
        try:
            self._refuse_other(os.pread(descriptor, RECORD, 0))
            os.pwrite(descriptor, encode(node, RECORD), 0)
            self._published = node.incarnation
        finally:
            os.close(descriptor)

    def nodes(self) -> dict[str, bytes]:
        """Returns the record of every node, undecoded: a reader of many decodes only what has changed."""
        self._reach()
        records = {}
        with os.scandir(self.root / "nodes") as entries:
            for entry in entries:
                name, ending = os.path.splitext(entry.name)
                if ending == ".json" and NAME.fullmatch(name):
                    records[name] = read_file(entry.path, RECORD, NO_RECORD)
        return records

    def publish_config(self, text: str) -> None:
        """Leaves this node's config for the others."""
        # Without it they report that it is another, and not in which keys.
        with contextlib.suppress(OSError):
            write_atomically(self.root / "nodes" / f"{self.name}.config", text.encode())

    def read_config(self, name: str) -> bytes:
        """Reads the config of a node; nothing if there is none."""
        return read_file(self.root / "nodes" / f"{name}.config", LARGEST, NO_RECORD)

    # --- plans

    def plans(self) -> list[RestartPlan]:
        """Returns every decision so far, oldest first. A file that holds none is passed over."""
        self._reach()
        with os.scandir(self.root / "plans") as entries:
            numbers = {int(e.name[:-5]) for e in entries if PLAN.fullmatch(e.name)}
        self.next_number = max(numbers, default=0) + 1
        for number in numbers - self._plans.keys():
            plan = decode(
                RestartPlan, read_file(self._plan(number), LARGEST, NO_RECORD)
            )
            if plan is not None and plan.number == number and plan.is_complete():
                self._plans[number] = plan
        return [self._plans[number] for number in sorted(self._plans)]

    def propose(self, plan: RestartPlan) -> bool:
        """Makes the plan the newest; returns false if another one took its number first."""
        temporary = self.root / "plans" / f".{self.name}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(encode(plan))
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, self._plan(plan.number))
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)

    def _plan(self, number: int) -> Path:
        return self.root / "plans" / f"{number:06}.json"

    # --- events, faults asked for, files of a generation

    def log(self, event: str, **fields: Any) -> None:
        """Appends an event. Lines that a full disk refuses wait for the next event: a run need not end for them."""
        if self.lost:
            return
        self._pending += (
            json.dumps({"wall": time.time(), "event": event, **fields}).encode() + b"\n"
        )
        try:
            descriptor = opened(
                self.root / f"events.{self.name}.jsonl",
                os.O_WRONLY | os.O_APPEND | os.O_CREAT,
            )
            try:
                self._pending = self._pending[os.write(descriptor, self._pending) :]
            finally:
                os.close(descriptor)
        except OSError:
            self._pending = self._pending[-MOST_PENDING:]

    def asked(self) -> list[str]:
        """Returns the faults that `survive inject` asked for."""
        return sorted(os.listdir(self.root / "inject"))

    def generation(self, number: int) -> Path:
        """Returns the directory of a generation's files, which is made."""
        path = self.root / f"gen-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    # --- the store is gone, or is another's

    def _reach(self) -> None:
        if self.lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.root))
        # Renamed away, and another run has begun under its name: a record of ours there would take that run from it.
        if self._published and self.root.stat().st_ino != self._directory:
            self._refuse_other(
                read_file(self.root / "nodes" / f"{self.name}.json", RECORD, NO_RECORD)
            )
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.root))

    def _refuse_other(self, record: bytes) -> None:
        node = decode(Node, record)
        if self._published and node is not None and node.incarnation != self._published:
            raise other_supervisor(node, self.root)


def config_of(root: Path, plan: RestartPlan) -> Path:
    """Returns where a plan's config stands: of this plan alone, since two leaders may write one each, of which one's
    plan comes to be.
    """
    return root / f"gen-{plan.generation}" / f"config.{plan.number}.{plan.leader}.yaml"


def refuse_unsafe(path: Path, follow: bool = True) -> None:
    """Raises ConfigError for a directory that others could put decisions into: it is another user's, writable by
    everybody, or (not `follow`) a link.
    """
    try:
        info = os.stat(path, follow_symlinks=follow)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {refusal(error)}.") from None
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(
            f"{path} is not a directory; give another with --set run.directory=PATH."
        )
    danger = "who could decide what runs here"
    if info.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to another user, {danger}; give a run.directory of your own."
        )
    if info.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path} can be written by everybody, {danger}; chmod o-w {path} mends that."
        )


def other_supervisor(node: Node, root: Path) -> ConfigError:
    """Returns the error of a supervisor that finds another's record under its name: its place may have been taken while
    it was frozen.
    """
    return ConfigError(
        f"another supervisor (process {node.pid} on {node.host}) is at work as {node.name} in {root.parent}; give "
        "this one another --node."
    )


def opened(path: str | Path, flags: int) -> int:
    """Opens a file of ours: follows no link, and does not wait where a pipe stands that nobody reads."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def read_file(
    path: str | Path, most: int, passed_over: Container[int] | None = None
) -> bytes:
    """Returns up to `most` bytes of a regular file; nothing of a link, a pipe or a device, nor of what cannot be read.

    `passed_over`: the only errors that count as nothing.
    """
    try:
        with open(path, "rb", opener=opened) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(most)
            return b""
    except OSError as error:
        if passed_over is not None and error.errno not in passed_over:
            raise
        return b""
