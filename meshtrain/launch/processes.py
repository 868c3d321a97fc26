"""Supervisors as children of this process: their output by node, signals passed on, and none of them outlives it.

A signal that ends a program (SIGTERM, SIGINT, SIGHUP) is passed on to all, once; the second kills them. Each child has a session of its
own, or Ctrl-C would reach it twice. If this process itself is killed, the kernel kills its children with it (`meshtrain.orphans`),
frozen ones too.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, TextIO

from meshtrain.cli import DONE, STOPPED
from meshtrain.errors import say
from meshtrain.launch.outcome import outcome
from meshtrain.orphans import die_with_parent
from meshtrain.run.early import SIGNALS

LOOK = 0.1  # seconds between two looks at who has ended
LONGEST_LINE = 2**16  # bytes that are held back for the end of their line


class Child:
    """One node's supervisor. `listens`: it is told of signals by words on its standard input, one a line, as it runs on another machine."""

    def __init__(self, name: str, words: Sequence[str], piped: bool, listens: bool) -> None:
        self.name, self.listens = name, listens
        pipe = subprocess.PIPE if piped else None
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def send(self, number: int) -> None:
        if self.listens and self.process.stdin is not None:
            # Its connection may be gone, and it then ends by itself.
            with contextlib.suppress(OSError):
                # A shell starts what is in its background with SIGINT ignored.
                self.process.stdin.write(b"KILL\n" if number == signal.SIGKILL else b"TERM\n")
                self.process.stdin.flush()
        else:
            self.process.send_signal(number)


def run(commands: Mapping[str, Sequence[str]], listens: bool = False) -> int:
    """Runs one command a node until all have ended; the exit code of them all (`outcome`). One node's output is left as it is."""
    children: list[Child] = []
    with _signals() as received, selectors.DefaultSelector() as pipes:
        try:
            for name, words in commands.items():
                child = Child(name, words, len(commands) > 1, listens)
                children.append(child)
                for pipe, to in ((child.process.stdout, sys.stdout), (child.process.stderr, sys.stderr)):
                    if pipe is not None:
                        os.set_blocking(pipe.fileno(), False)
                        pipes.register(pipe, selectors.EVENT_READ, _Lines(name, pipe, to))
            return _wait(children, pipes, received)
        finally:
            for child in children:
                if child.process.poll() is None:
                    child.send(signal.SIGKILL)
                    # What stands between us and another machine ends too.
                    child.process.kill()
                    child.process.wait()


def _wait(children: Sequence[Child], pipes: selectors.BaseSelector, received: list[int]) -> int:
    passed, running = 0, list(children)
    while running:
        for key, _ in pipes.select(LOOK):
            if not key.data.pass_on():
                pipes.unregister(key.fileobj)
        for number in received[passed:]:
            passed += 1
            if passed == 1:
                say(f"{signal.Signals(number).name}: the nodes are told to stop; once more kills them.")
            for child in running:
                child.send(number if passed == 1 else signal.SIGKILL)
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            # Told to stop, they do.
            if child.process.returncode not in ((DONE, STOPPED) if passed else (DONE,)):
                _say_ended(child, bool(running))
    # What they wrote last; a pipe that a child of theirs still holds has no end.
    for key in list(pipes.get_map().values()):
        while key.data.pass_on() and key.data.more:
            pass
        key.data.end()
    return outcome(child.process.returncode for child in children)


def _say_ended(child: Child, others: bool) -> None:
    code = child.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    say(f"{child.name} {how}{'; the others go on' if others else ''}.")


class _Lines:
    """One stream of a node, passed on by whole lines with the node's name before each."""

    def __init__(self, name: str, pipe: IO[bytes], to: TextIO) -> None:
        self.name, self.pipe, self.to, self.held, self.more = name, pipe, to, b"", False

    def pass_on(self) -> bool:
        """Reads what is there; false at the end of the stream."""
        try:
            read = os.read(self.pipe.fileno(), LONGEST_LINE)
        except BlockingIOError:
            self.more = False
            return True
        self.more = bool(read)
        *lines, self.held = (self.held + read).split(b"\n")
        if not read or len(self.held) > LONGEST_LINE:
            lines, self.held = [*lines, *filter(None, [self.held])], b""
        self._write(lines)
        return bool(read)

    def end(self) -> None:
        self._write(filter(None, [self.held]))

    def _write(self, lines: Iterator[bytes] | list[bytes]) -> None:
        self.to.writelines(f"{self.name}: {line.decode(errors='backslashreplace')}\n" for line in lines)
        self.to.flush()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The numbers of the signals that came, in their order, instead of what they do."""
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)

    # Under nohup, or in a script's background, some are ignored, and stay so.
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
