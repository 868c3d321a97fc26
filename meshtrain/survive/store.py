"""What supervisors share, and nothing else: a directory, on which every node can read and write.

    RUN/survive/
      plans/000012.json    a decision each; its number is taken by link(), which one of several leaders can do
      nodes/NAME.json      what a node says of itself; of one size and rewritten in place, so that a full disk does not matter
      events.NAME.jsonl    what happened, as that node saw it
      gen-3/               config, output, stacks and faults of the processes of generation 3
      inject/, injected/   faults asked for, and done

Another store needs the same six operations: `publish`, `nodes`, `plans`, `propose`, `say`, `generation`; a compare-and-swap in one of them.
"""

import contextlib
import errno
import json
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, refusal
from meshtrain.survive.records import LARGEST, NAME, Node, Plan, decode, encode

SURVIVE = "survive"
RECORD = 4096  # bytes of a node's record
MOST_UNSAID = 1 << 20  # bytes of events that wait for a disk
PLAN = re.compile(r"\d{6,18}\.json", re.ASCII)
# What stands in the place of a record and is none: a directory, a link, another user's file, a pipe.
NO_RECORD = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EAGAIN, errno.ENXIO)


class Store:
    """The directory `RUN/survive` as the node `name` uses it. OSError where the system refuses; ConfigError if others may write there."""

    def __init__(self, run: Path, name: str) -> None:
        self.root, self.name = run / SURVIVE, name
        self._plans: dict[int, Plan] = {}
        self.next_number = 1  # of a plan, as far as this node has seen
        self._unsaid = b""
        self._published = ""  # the incarnation that its record is of
        self._lost = False
        refuse_unsafe(run)
        for part in ("", "plans", "nodes", "inject", "injected"):
            with contextlib.suppress(FileExistsError):
                (self.root / part).mkdir(mode=0o700)
            refuse_unsafe(self.root / part, follow=False)
        self._directory = self.root.stat().st_ino

    # --- nodes

    def publish(self, node: Node) -> None:
        """What this node says of itself; ConfigError if another supervisor has said something under its name since the last time."""
        self._reach()
        # Not blocking: what stands there may be a pipe that nobody reads.
        path = self.root / "nodes" / f"{self.name}.json"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            found = decode(Node, os.pread(descriptor, RECORD, 0))
            if self._published and found is not None and found.incarnation != self._published:
                raise twin(found, self.root)
            os.pwrite(descriptor, encode(node, RECORD), 0)
            self._published = node.incarnation
        finally:
            os.close(descriptor)

    def nodes(self) -> dict[str, bytes]:
        """The record of every node, as it stands there: who reads many of them again and again decodes what has changed."""
        self._reach()
        found = {}
        with os.scandir(self.root / "nodes") as entries:
            for entry in entries:
                name, ending = os.path.splitext(entry.name)
                if ending == ".json" and NAME.fullmatch(name):
                    found[name] = _read(entry.path, RECORD)
        return found

    # --- plans

    def plans(self) -> list[Plan]:
        """Every decision so far, oldest first. A file that holds none is passed over."""
        self._reach()
        with os.scandir(self.root / "plans") as entries:
            numbers = {int(e.name[:-5]) for e in entries if PLAN.fullmatch(e.name)}
        self.next_number = max(numbers, default=0) + 1
        for number in numbers - self._plans.keys():
            plan = decode(Plan, _read(self._plan(number), LARGEST))
            if plan is not None and plan.number == number and plan.is_whole():
                self._plans[number] = plan
        return [self._plans[number] for number in sorted(self._plans)]

    def propose(self, plan: Plan) -> bool:
        """Makes the plan the newest; not if another one took its number first."""
        temporary = self.root / "plans" / f".{self.name}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(encode(plan))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, self._plan(plan.number))
            except FileExistsError:
                return False
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def _plan(self, number: int) -> Path:
        return self.root / "plans" / f"{number:06}.json"

    # --- what happened

    def say(self, event: str, **what: Any) -> None:
        """Appends an event. What a full disk does not take waits for the next one: a run need not end for it."""
        if self._lost:
            return
        self._unsaid += json.dumps({"wall": time.time(), "event": event, **what}).encode() + b"\n"
        try:
            path = self.root / f"events.{self.name}.jsonl"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
            try:
                self._unsaid = self._unsaid[os.write(descriptor, self._unsaid) :]
            finally:
                os.close(descriptor)
        except OSError:
            self._unsaid = self._unsaid[-MOST_UNSAID:]

    def asked(self) -> list[str]:
        """Faults that `survive inject` asked for."""
        return sorted(os.listdir(self.root / "inject"))

    def lose(self) -> None:
        """From now on nothing of it can be reached from here: the fault `store-lost`."""
        self._lost = True

    def _reach(self) -> None:
        if self._lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.root))
        # Renamed away, and another run has begun under its name: a record of ours there would take that run from it.
        if self._published and self.root.stat().st_ino != self._directory:
            found = decode(Node, _read(self.root / "nodes" / f"{self.name}.json", RECORD))
            if found is not None and found.incarnation != self._published:
                raise twin(found, self.root)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.root))

    def config(self, plan: Plan) -> Path:
        """Where the config of a plan's processes stands."""
        self.generation(plan.generation)
        return config_of(self.root, plan)

    def generation(self, number: int) -> Path:
        """The directory of a generation's files, made."""
        path = self.root / f"gen-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path


def config_of(root: Path, plan: Plan) -> Path:
    """The config of a plan's generation: of this plan alone, since two leaders may write one each, of which one's plan comes to be."""
    return root / f"gen-{plan.generation}" / f"config.{plan.number}.{plan.leader}.yaml"


def refuse_unsafe(path: Path, follow: bool = True) -> None:
    """ConfigError for a directory that others could put decisions into: of another user, writable by everybody, or (not `follow`) a link."""
    try:
        found = os.stat(path, follow_symlinks=follow)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {refusal(error)}.") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is no directory; give another with --set run.directory=PATH.")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to another user, who could decide what runs here; give a run.directory of your own."
        )
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path} can be written by everybody, who could decide what runs here; chmod o-w {path} mends that."
        )


def twin(node: Node, root: Path) -> ConfigError:
    """Of two supervisors under one name the one that finds the other's record goes: its place may have been taken while it was frozen."""
    return ConfigError(
        f"another supervisor (process {node.pid} on {node.host}) is at work as {node.name} in {root.parent}; give this one another --node."
    )


def _read(path: str | Path, most: int) -> bytes:
    """What stands there; nothing of what is no record, for which no supervisor may stop."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.read(descriptor, most)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in NO_RECORD:
            return b""
        raise
