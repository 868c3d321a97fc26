"""`local N`: N nodes on this machine, to try a run on several of them; and supervisors as children of this process, as
`ssh` has them too.

Output is marked by node. A signal that ends a program (SIGTERM, SIGINT, SIGHUP) is passed on to all, once; the second
kills them. Each child has a session of its own, or Ctrl-C would reach it twice. If this process itself is killed, the
kernel kills its children with it (`meshtrain.orphans`), frozen ones too.
"""

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TextIO

from meshtrain.cli import DONE, STOPPED, Parser, whole_number
from meshtrain.config import load
from meshtrain.errors import say
from meshtrain.launch import outcome
from meshtrain.launch.job import Launcher, add_flags, make
from meshtrain.orphans import die_with_parent
from meshtrain.run.early import SIGNALS

ADDRESS = "127.0.0.1"
LOOK = 0.1  # seconds between two looks at who has ended
LONGEST_LINE = 2**16  # bytes that wait for the end of their line


def add(parser: Parser) -> None:
    parser.add_argument(
        "nodes",
        type=whole_number,
        metavar="N",
        help="nodes, each with a share of the mesh's devices",
    )
    parser.add_config()
    add_flags(parser)


def run(options: argparse.Namespace) -> int:
    job = make(
        load(options.config, options.set), options, options.nodes, sys.executable
    )
    names = [f"n{number}" for number in range(options.nodes)]
    return supervise_all(
        {
            name: [*job.supervisor, "--node", name, "--address", ADDRESS]
            for name in names
        }
    )


LAUNCHERS = {"local": Launcher("run N nodes on this machine", add, run)}


class NodeProcess:
    """One node's supervisor.

    `listens`: signals reach it as words on its standard input, one a line, as it runs on another machine.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        piped: bool,
        listens: bool,
    ) -> None:
        self.name = name
        pipe = subprocess.PIPE if piped else None
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def send(self, number: int) -> None:
        if self.process.stdin is None:
            self.process.send_signal(number)
            return
        # Its connection may be gone, and it then ends by itself.
        with contextlib.suppress(OSError):
            # A shell starts what is in its background with SIGINT ignored.
            self.process.stdin.write(
                b"KILL\n" if number == signal.SIGKILL else b"TERM\n"
            )
            self.process.stdin.flush()


def supervise_all(commands: Mapping[str, Sequence[str]], listens: bool = False) -> int:
    """Runs one command a node until all have ended; returns the exit code of them all (`outcome`).

    A single node's output is left as it is.
    """
    children: list[NodeProcess] = []
    with _signals() as received, selectors.DefaultSelector() as pipes:
        try:
            for name, command in commands.items():
                child = NodeProcess(name, command, len(commands) > 1, listens)
                children.append(child)
                for pipe, to in (
                    (child.process.stdout, sys.stdout),
                    (child.process.stderr, sys.stderr),
                ):
                    if pipe is not None:
                        os.set_blocking(pipe.fileno(), False)
                        pipes.register(
                            pipe, selectors.EVENT_READ, _Lines(name, pipe, to)
                        )
            return _wait(children, pipes, received)
        finally:
            for child in children:
                if child.process.poll() is None:
                    child.send(signal.SIGKILL)
                    # What stands between us and another machine ends too.
                    child.process.kill()
                    child.process.wait()


def _wait(
    children: Sequence[NodeProcess], pipes: selectors.BaseSelector, received: list[int]
) -> int:
    passed = 0
    running = list(children)
    while running:
        for key, _ in pipes.select(LOOK):
            if key.data.pass_on() is False:
                pipes.unregister(key.fileobj)
        for number in received[passed:]:
            passed += 1
            if passed == 1:
                say(
                    f"{signal.Signals(number).name}: the nodes are told to stop; once more kills them."
                )
            for child in running:
                child.send(number if passed == 1 else signal.SIGKILL)
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            code = child.process.returncode
            # Once they are asked to stop, they do.
            if code not in ((DONE, STOPPED) if passed else (DONE,)):
                how = (
                    f"was killed by {signal.Signals(-code).name}"
                    if code < 0
                    else f"ended with exit code {code}"
                )
                say(f"{child.name} {how}{'; the others go on' if running else ''}.")
    # What they wrote last; a pipe that a child of theirs still has open has no end.
    for key in list(pipes.get_map().values()):
        while key.data.pass_on():
            pass
        key.data.end()
    return outcome(child.process.returncode for child in children)


class _Lines:
    """One stream of a node, passed on by complete lines with the node's name before each."""

    def __init__(self, name: str, pipe: IO[bytes], to: TextIO) -> None:
        self.name = name
        self.pipe = pipe
        self.to = to
        self.begun = b""

    def pass_on(self) -> bool | None:
        """Reads some of what is there; returns None if nothing is, False at the end of the stream."""
        try:
            read = os.read(self.pipe.fileno(), LONGEST_LINE)
        except BlockingIOError:
            return None
        *lines, self.begun = (self.begun + read).split(b"\n")
        self._write(lines)
        if not read or len(self.begun) > LONGEST_LINE:
            self.end()
        return bool(read)

    def end(self) -> None:
        self._write(filter(None, [self.begun]))
        self.begun = b""

    def _write(self, lines: Iterable[bytes]) -> None:
        self.to.writelines(
            f"{self.name}: {line.decode(errors='backslashreplace')}\n" for line in lines
        )
        self.to.flush()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the numbers of the signals that come, in their order, instead of what they do."""
    received: list[int] = []
    # Under nohup, or in a script's background, some are ignored, and stay so.
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in heard
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
