"""What a fault is, the place where it is arranged, and the processes that meet it.

A fault is a function that arranges, runs and judges; it ends in one of

    named       one plain sentence with the right exit code, or the told way of going on; nothing is lost
    unclear     told, but not well: another exit code, more than one sentence, a sentence that misleads
    silent      a wrong result, or something lost, without a word
    traceback   a traceback, or a death by a signal
    hang        no end, or nothing where something must happen
    not tried   this machine does not let us arrange it

Processes are forked from one that has imported everything and started no backend: a run takes a second and a half.
"""

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import digests, steps

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534
PATIENCE = 300.0  # seconds that a process may take, on a machine with much else to do
LONGEST = 1800.0  # of a fault that takes minutes
STEPS = 8  # of a run
EVERY = 2  # of its checkpoints
LAST = 6  # the newest checkpoint of an interrupted one
TINY: dict[str, dict[str, Any]] = {
    "run": {"directory": "run"},
    "model": {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 257},
    "data": {"source": "synthetic"},
    "train": {"steps": STEPS, "global_batch_size": 4, "sequence_length": 16},
    "optimizer": {"warmup_steps": 2},
    "checkpoint": {"every": EVERY, "keep": 20},
}
PROGRESS = re.compile(r"\d+ files?, [\d.]+ MB$|meshtrain: prepar(ing|ed) ")
DEATHS = (
    "Traceback (most recent call last)",
    "Fatal Python error",
    "Exception ignored in",
    "Bus error",
)


class Verdict(Exception):
    """Anything but `named`, and why."""

    name = ""


class Unclear(Verdict):
    name = "unclear"


class Silent(Verdict):
    name = "silent"


class Crash(Verdict):
    name = "traceback"


class Hang(Crash):
    name = "hang"


class NotTried(Verdict):
    name = "not tried"


Meet = Callable[["Place"], None]  # arranges, runs and judges


@dataclass(frozen=True)
class Fault:
    room: str
    kind: str
    name: str
    meet: Meet
    long: bool  # it takes minutes


FAULTS: list[Fault] = []
_now = {"room": "", "kind": ""}  # of the faults that are registered


def register(rooms: Iterable[str]) -> None:
    """Imports modules of this package, each of which registers its faults."""
    for room in rooms:
        _now["room"] = room
        importlib.import_module(f"experiments.faults.{room}")


def kind(word: str) -> None:
    """The kind of all faults that are registered from here on, until the next one is said."""
    _now["kind"] = word


def fault(name: str, long: bool = False) -> Callable[[Meet], Meet]:
    """Makes a fault of a function that arranges, runs and judges it."""

    def add(meet: Meet) -> Meet:
        FAULTS.append(Fault(_now["room"], _now["kind"], name, meet, long))
        return meet

    return add


# --- processes


@dataclass(frozen=True)
class Ended:
    """How a process ended; `code` is None where it had to be killed for going on."""

    code: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def sentences(self) -> list[str]:
        """The lines of stderr, but for what is said of an input before and while it is prepared."""
        return [
            line
            for line in self.err.splitlines()
            if line.strip() and not PROGRESS.match(line)
        ]

    def checked(self) -> "Ended":
        """Itself, unless it crashed."""
        for sign in DEATHS:
            if sign in self.said:
                raise Crash(last_line(self.said))
        if self.code is None:
            raise Hang(f"still running after {PATIENCE:.0f} s: {last_line(self.said)}")
        if self.code < 0:
            raise Crash(f"{signal.Signals(-self.code).name}: {last_line(self.said)}")
        return self


class Running:
    """A process under way, in a place."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.status: int | None = None

    @property
    def out(self) -> str:
        return self.log.with_suffix(".out").read_text(errors="replace")

    def alive(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is None

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds; a fault that cannot be arranged since the process has ended says so."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if not self.alive():
                raise Crash(f"ended before the fault: {last_line(self.end().said)}")
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise Hang(f"nothing happened: {last_line(self.out)}")
            time.sleep(0.001)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The process stands still meanwhile."""
        self.send(signal.SIGSTOP)
        yield
        self.send(signal.SIGCONT)

    def end(self, patience: float = PATIENCE) -> Ended:
        deadline = time.monotonic() + patience
        hung = False
        while self.alive():
            if time.monotonic() > deadline:
                hung = True
                self.send(signal.SIGKILL)
            time.sleep(0.005)
        assert self.status is not None
        code = None if hung else os.waitstatus_to_exitcode(self.status)
        return Ended(
            code, self.out, self.log.with_suffix(".err").read_text(errors="replace")
        )


def _become(
    log: Path, directory: Path, before: Callable[[], None] | None, user: int | None
) -> None:
    """What a forked process does first."""
    for number, suffix in ((1, ".out"), (2, ".err")):
        opened = os.open(
            log.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666
        )
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(directory)
    if before is not None:
        before()
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def _as_python_ends(call: Callable[[], int]) -> int:
    try:
        return call()
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


# --- places


class Place:
    """A directory of its own for one fault, in which runs, data and caches have relative names."""

    def __init__(self, directory: Path, bases: Path) -> None:
        self.dir, self.bases = directory, bases
        self.run = directory / "run"
        self.checkpoints = self.run / "checkpoints"
        self.metrics = self.run / "metrics.jsonl"
        self.started = 0
        self._mounts = False

    # arranging

    def base(self, name: str = "synthetic", interrupted: bool = True) -> "Place":
        """Copies a base run with its data and cache; an interrupted one as a kill -9 after step 7 would have left
        it.
        """
        shutil.copytree(self.bases / name, self.dir, dirs_exist_ok=True, symlinks=True)
        if interrupted:
            shutil.rmtree(self.checkpoints / str(STEPS))
            lines = self.metrics.read_bytes().splitlines(keepends=True)
            self.metrics.write_bytes(b"".join(lines[: STEPS - 1]))
        return self

    def config(self, **sections: dict[str, Any]) -> Path:
        """Writes the config file: the tiny run with the given sections over it."""
        values = {
            section: {**TINY.get(section, {}), **sections.get(section, {})}
            for section in {**TINY, **sections}
        }
        return self.file("config.yaml", json.dumps(values))

    def file(self, name: str, content: str = "") -> Path:
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def mount(self, path: Path, options: str) -> None:
        """A small tmpfs at `path` that this fault's processes alone see, with what stood there before."""
        self._own_mounts()
        aside = path.with_name(path.name + ".aside")
        if path.exists():
            path.rename(aside)
        path.mkdir(parents=True)
        _mount("tmpfs", path, 0, options)
        if aside.exists():
            shutil.copytree(aside, path, dirs_exist_ok=True, symlinks=True)

    def remount_read_only(self, path: Path) -> None:
        self._own_mounts()
        _mount(str(path), path, 4096)  # bind
        _mount("none", path, 4096 | 32 | 1)  # bind, remount, read-only

    def fill(self, path: Path, leave: int = 0) -> None:
        """Fills the disk of `path` up but for `leave` bytes."""
        filler = path / ".filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        if leave:
            os.truncate(filler, max(0, filler.stat().st_size - leave))

    def _own_mounts(self) -> None:
        if self._mounts:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x20000) or libc.mount(
            b"none", b"/", None, 0x4000 | 0x40000, None
        ):  # private, all of them
            raise NotTried("a process may not have mounts of its own here")
        self._mounts = True

    def give_to(self, user: int) -> int:
        """Another user's files from here on; not tried where that is not ours to say."""
        if os.getuid():
            raise NotTried("only root can start processes of another user")
        for folder, folders, files in os.walk(self.dir):
            for name in (".", *folders, *files):
                os.chown(Path(folder, name), user, user, follow_symlinks=False)
        return user

    # running

    def start(
        self,
        module: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        before: Callable[[], None] | None = None,
        user: int | None = None,
        call: Callable[[], int] | None = None,
    ) -> Running:
        """`python -m MODULE ARGUMENTS`, or any call, in a forked process."""
        self.started += 1
        log = self.dir / f"log-{self.started}"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.environ.update(
                    {
                        "XDG_CACHE_HOME": str(self.dir / "cache"),
                        "HOME": str(self.dir),
                        **(env or {}),
                    }
                )
                _become(log, self.dir, before, user)
                main = call or (
                    lambda: importlib.import_module(module).main(list(arguments))
                )
                code = _as_python_ends(main)
                sys.stdout.flush()
            finally:
                os._exit(code)
        for suffix in (".out", ".err"):  # it is there before the process says anything
            log.with_suffix(suffix).touch()
        return Running(pid, log)

    def command(self, module: str, *arguments: str, **how: Any) -> Ended:
        file = module if module == "train" or "." in module else f"{module}.__main__"
        return self.start(f"meshtrain.{file}", *arguments, **how).end().checked()

    def training(
        self, *settings: str, config: str | Path = "config.yaml", **how: Any
    ) -> Running:
        """The run of config.yaml, which is made if it is not there, with --set of each setting."""
        if config == "config.yaml" and not (self.dir / "config.yaml").exists():
            self.config()
        sets = [word for setting in settings for word in ("--set", setting)]
        return self.start("meshtrain.train", "--config", str(config), *sets, **how)

    def train(self, *settings: str, **how: Any) -> Ended:
        return self.training(*settings, **how).end().checked()

    def python(
        self,
        *arguments: str,
        env: dict[str, str | None] | None = None,
        shell: str = "",
    ) -> Ended:
        """A new Python process, for what decides before anything is imported; `shell` stands behind the command."""
        command = " ".join([sys.executable, *(f"'{a}'" for a in arguments), shell])
        merged = {
            **os.environ,
            "XDG_CACHE_HOME": str(self.dir / "cache"),
            "PYTHONPATH": str(REPOSITORY),
        }
        for name, value in (env or {}).items():
            merged.pop(name, None)
            if value is not None:
                merged[name] = value
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.dir,
                env=merged,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return Ended(None, "", "").checked()
        code = done.returncode if done.returncode < 128 else 128 - done.returncode
        return Ended(code, done.stdout, done.stderr).checked()

    # judging

    def rows(self) -> list[dict[str, Any]]:
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_bytes().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def last_step(self) -> int:
        return max((row["step"] for row in self.rows()), default=0)

    def undisturbed(self, base: str = "synthetic") -> None:
        """Each step once, in order, each loss the same bits as in the run that nothing disturbed."""
        whole = self.bases / base / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in whole.read_text().splitlines()]
        found = [(row["step"], row["loss"]) for row in self.rows()]
        if found != [(row["step"], row["loss"]) for row in rows]:
            raise Silent(
                f"metrics.jsonl has steps {[s for s, _ in found]}, or other losses than the undisturbed run"
            )

    def intact(self, *expected: int) -> None:
        """These steps are there, each under its own name and without damage."""
        for step in expected:
            directory = self.checkpoints / str(step)
            if (
                not directory.is_dir()
                or steps.commit_problem(directory)
                or digests.problems(directory)
            ):
                raise Silent(f"checkpoint {step} is gone or damaged")

    def digests(self, *paths: Path) -> dict[str, str]:
        """Digest and name of every file under the paths."""
        return {
            digest_of(file): str(file)
            for path in paths
            for file in files_of(path)
            if file.name != ".lock"
        }

    def survive(self, before: dict[str, str]) -> None:
        """Every file of `before` is still somewhere, byte for byte."""
        now = self.digests(self.dir)
        if lost := [name for digest, name in before.items() if digest not in now]:
            raise Silent(f"{len(lost)} files are lost, such as {lost[0]}")


# --- a row: a fault of which only the arrangement and how it is run differ


def goes_on(
    name: str,
    arrange: Callable[[Place], object] = lambda p: None,
    base: str = "synthetic",
    quiet: bool = False,
    **how: Any,
) -> None:
    """Once it is arranged, the run goes on and ends as if nothing had been."""

    @fault(name)
    def _(p: Place) -> None:
        p.base(base)
        arrange(p)
        before = p.digests(p.checkpoints)
        went_on(p, p.train(**how), base, quiet)
        p.survive(before)


# --- outcomes


def refused(ended: Ended, *words: str, code: int = 2) -> None:
    """Refused with one sentence that has these words (each may name choices: a|b)."""
    if ended.code == 0:
        raise Silent(f"exit code 0; it said: {last_line(ended.said)}")
    if ended.code != code:
        raise Unclear(f"exit code {ended.code} and not {code}: {last_line(ended.err)}")
    if len(ended.sentences) != 1:
        raise Unclear(f"{len(ended.sentences)} lines on stderr: {last_line(ended.err)}")
    sentence = ended.sentences[0]
    if not sentence.startswith("meshtrain: "):
        raise Unclear(f"without the prefix: {sentence}")
    if len(sentence) > 700:
        raise Unclear(f"a sentence of {len(sentence)} characters: {sentence[:100]}")
    contains(sentence, *words)


def failed(
    ended: Ended, *words: str, codes: Sequence[int] = (), silent: str = "exit code 0"
) -> None:
    """Ended badly, with one of these codes if any is given, in plain sentences alone, which have these words."""
    if ended.code == 0:
        raise Silent(silent)
    if codes and ended.code not in codes:
        raise Unclear(f"exit code {ended.code}: {last_line(ended.err)}")
    if not ended.sentences or any(
        not line.startswith("meshtrain: ") for line in ended.sentences
    ):
        raise Unclear(last_line(ended.err))
    contains(ended.err, *words)


def contains(text: str, *words: str, verdict: type[Verdict] = Unclear) -> None:
    for word in words:
        if not any(choice.lower() in text.lower() for choice in word.split("|")):
            raise verdict(f"it does not say {word!r}: {last_line(text)}")


def done(ended: Ended, *words: str, code: int = 0, quiet: bool = False) -> None:
    """Ended well, having said these words; without them what happened was silent. `quiet`: and nothing on stderr."""
    if ended.code != code:
        raise Unclear(f"exit code {ended.code} and not {code}: {last_line(ended.said)}")
    contains(ended.said, *words, verdict=Silent)
    if quiet and ended.sentences:
        raise Unclear(f"noise on stderr: {ended.sentences[-1]}")


def resumed(ended: Ended, after: int) -> None:
    """It went on after this step (0: began anew)."""
    found = re.search(r"going on after step (\d+)", ended.out)
    step = int(found.group(1)) if found else 0
    if step != after:
        raise Silent(f"went on after step {step}, not {after}")


def went_on(
    p: Place, ended: Ended, base: str = "synthetic", quiet: bool = False
) -> None:
    """It went on after the newest checkpoint, and the run is as if nothing had disturbed it."""
    done(ended, quiet=quiet)
    resumed(ended, LAST)
    p.undisturbed(base)
    p.intact(STEPS)


def told_or_done(ended: Ended, *words: str) -> bool:
    """Either is right: refused in one sentence, or done. True if done."""
    if ended.code == 0:
        return True
    refused(ended, *words, code=1 if ended.code == 1 else 2)
    return False


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines or ["nothing"])[-1][:300]


def files_of(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return [p for p in sorted(path.rglob("*")) if p.is_file() and not p.is_symlink()]


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _mount(what: str, path: Path, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(what.encode(), str(path).encode(), b"tmpfs", flags, options.encode()):
        raise NotTried(f"cannot mount here: {os.strerror(ctypes.get_errno())}")


def flip(path: Path) -> None:
    """Flips a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def verdict_of(fault: Fault, directory: Path, bases: Path) -> tuple[str, str]:
    """Meets a fault in a place of its own; its verdict, and why."""
    try:
        fault.meet(Place(directory, bases))
    except Verdict as found:
        return found.name, str(found)
    return "named", ""


# --- meeting them


def meet(
    faults: Sequence[Any],
    judge: Callable[[Any, Path], tuple[str, str]],
    work: Path,
    jobs: int,
    patience: Callable[[Any], float] = lambda fault: 4 * PATIENCE,
) -> Iterator[tuple[Any, str, str, float]]:
    """Judges each fault in a process and a place of its own, `jobs` at a time; verdict, reason and seconds of each."""
    waiting, running = list(reversed(list(enumerate(faults)))), {}
    work.mkdir(exist_ok=True)
    while waiting or running:
        while waiting and len(running) < jobs:
            number, fault = waiting.pop()
            place = work / f"{number:03d}"
            place.mkdir()
            result = work / f"{number:03d}.json"
            pid = os.fork()
            if not pid:
                _meet(fault, judge, place, result)
            running[pid] = fault, place, result, time.monotonic()
        for pid, (fault, place, result, began) in list(running.items()):
            seconds = time.monotonic() - began
            if os.waitpid(pid, os.WNOHANG)[0] or seconds > patience(fault):
                with contextlib.suppress(OSError):  # and whatever it left running
                    os.killpg(pid, signal.SIGKILL)
                said = result.read_text() if result.exists() else '["hang", "no end"]'
                yield fault, *json.loads(said), seconds
                del running[pid]
                os.system(f"chmod -R u+rwX {place} 2>/dev/null; rm -rf {place}")
        time.sleep(0.01)


def _meet(
    fault: Any,
    judge: Callable[[Any, Path], tuple[str, str]],
    place: Path,
    result: Path,
) -> None:
    os.setsid()
    os.chdir(place)
    try:
        found = judge(fault, place)
    except BaseException as error:
        found = (
            "traceback",
            f"the fault itself failed: {type(error).__name__}: {error}",
        )
        traceback.print_exc()
    result.write_text(json.dumps(found))
    os._exit(0)
