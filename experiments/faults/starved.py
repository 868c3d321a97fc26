"""Full disks, no inodes, read-only disks, limits, and files of another user: at each kind of file that a run writes."""

import errno
import fcntl
import io
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable

from experiments.faults.bases import PREPARE
from experiments.faults.harness import (
    LAST,
    NOBODY,
    STEPS,
    NotTried,
    Place,
    Running,
    Silent,
    Unclear,
    done,
    failed,
    fault,
    goes_on,
    kind,
    last_line,
    refused,
    resumed,
)

TRAIN = ("train", "--config", "config.yaml")


def keeps_rows(p: Place) -> None:
    steps = [row["step"] for row in p.rows()]
    if steps[:LAST] != list(range(1, LAST + 1)):
        raise Silent(f"metrics.jsonl has steps {steps}")


# --- full disks
kind("full-disk")


def resumed_full(name: str, leave: int, torn: bool = False) -> None:
    """With room again, the same command ends the run as if nothing had been."""

    @fault(f"a resume on a disk {name}")
    def _(p: Place) -> None:
        p.base()
        if torn:
            p.metrics.write_bytes(p.metrics.read_bytes() + b'{"step": 8')
        p.mount(p.run, "size=4m")
        p.fill(p.run, leave)
        before = p.digests(p.checkpoints)
        failed(p.train(), "no space|full", codes=(1, 2))
        p.survive(before)
        p.intact(2, 4, 6)
        keeps_rows(p)
        (p.run / ".filler").unlink(missing_ok=True)
        done(p.train())
        p.undisturbed()
        p.intact(STEPS)


resumed_full("that is full, with a torn row", 0, torn=True)
resumed_full("with room for 4 kB", 4096)
resumed_full("with room for half a checkpoint", 100_000)
resumed_full("with room for all but the digests", 206_000)


def sixty(p: Place, act: Callable[[], object]) -> Running:
    """A run of sixty steps, to whose disk something happens after the fifth."""
    running = p.training("train.steps=60", "checkpoint.every=20")
    running.until(lambda: p.last_step() >= 5)
    with running.frozen():
        act()
    return running


@fault("the disk fills while training, and has room again before the end")
def fills(p: Place) -> None:
    p.mount(p.run, "size=4m")
    running = sixty(p, lambda: p.fill(p.run))
    said = running.log.with_suffix(".err")
    running.until(
        lambda: "could not be written" in said.read_text() or not running.alive()
    )
    with running.frozen():
        (p.run / ".filler").unlink()
    done(running.end().checked(), "could not be written")
    p.intact(60)
    if [row["step"] for row in p.rows()] != list(range(1, 61)):
        raise Silent("metrics.jsonl lacks rows")


kind("no-inodes")


def inodes(name: str, count: int, base: str = "") -> None:
    """The disk has `count` inodes; at a resume, so many more than are used."""

    @fault(f"no inodes: {name}")
    def _(p: Place) -> None:
        if base:
            p.base(base)
        used = len([*p.run.rglob("*")]) + 2 if base else 0
        p.mount(p.run, f"size=8m,nr_inodes={used + count}")
        failed(p.train(), "no space")


inodes("a new run", 2)
inodes("in the first checkpoint", 10)
inodes("in a checkpoint's arrays", 14)
inodes("after a resume", 4, base="synthetic")

# --- read-only disks, and one that fails
kind("read-only")


def read_only(p: Place) -> None:
    p.remount_read_only(p.dir / "text")
    p.remount_read_only(p.dir / "cache")


@fault("a cache on a read-only disk, that lacks what is needed")
def no_cache(p: Place) -> None:
    p.base("packed")
    shutil.rmtree(p.dir / "cache")
    (p.dir / "cache").mkdir()
    p.remount_read_only(p.dir / "cache")
    before = p.digests(p.run)
    refused(p.train(), "read-only", "XDG_CACHE_HOME")
    p.survive(before)


goes_on(
    "text and a cache on a read-only disk, with what is needed",
    read_only,
    base="packed",
)


@fault("a read-only disk: ls, show, verify, diff, and the start of another run")
def read_only_reading(p: Place) -> None:
    p.base()
    p.remount_read_only(p.run)
    for command in ("ls run", "show run", "verify run", "diff run run"):
        done(p.command("checkpoint", *command.split()))
    ended = p.train("checkpoint.resume=run", "run.directory=second")
    done(ended)
    resumed(ended, LAST)


kind("disk-fails")


@fault("the disk fails while training: every read and write is an error")
def disk_fails(p: Place) -> None:
    """A real file system, which a remount could not make read-only under open files; shut down, it refuses all."""
    image = p.dir / "disk"
    image.touch()
    os.truncate(image, 16 << 20)
    if (
        not shutil.which("mkfs.ext4")
        or subprocess.run(["mkfs.ext4", "-q", image]).returncode
    ):
        raise NotTried("mkfs.ext4 is not installed (Debian: apt install e2fsprogs)")
    p.mount(p.run, "size=8k")
    mount = ["mount", "-o", "loop", image, p.run]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        raise NotTried("a loop device may not be mounted here")

    def shut_down() -> None:
        descriptor = os.open(p.run, os.O_RDONLY)
        # EXT4_IOC_SHUTDOWN, without writing the journal.
        fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))
        os.close(descriptor)

    failed(sixty(p, shut_down).end().checked(), "input/output error", codes=(1,))


# --- what commands write
kind("full-output")


def full_output(name: str, size: str, leave: int, *command: str, code: int) -> None:
    """It is whole or not there, on a disk with so much room."""

    @fault(f"a full disk: {name}")
    def _(p: Place) -> None:
        p.base("text")
        p.mount(p.dir / "disk", f"size={size}")
        p.fill(p.dir / "disk", leave)
        refused(p.command(*command), "no space", code=code)
        if (p.dir / "disk/whole").is_file():
            raise Silent("half a file is left")
        (p.dir / "disk/.filler").unlink()
        done(p.command(*command))


PREPARED = ("data", *PREPARE[:-3], "disk/whole", *PREPARE[-2:])
LEARNED = ("train-tokenizer", "--input", "text", "--vocab-size", "400", "--output")
PAGE = ("plan", "--config", "config.yaml", "--html", "disk/whole")
full_output("shards, with no room at all", "1m", 0, *PREPARED, code=1)
full_output("shards, with room for a part", "1m", 16_384, *PREPARED, code=1)
full_output("shards, but for the manifest", "1m", 32_768, *PREPARED, code=1)
full_output("a tokenizer", "256k", 4096, "data", *LEARNED, "disk/whole", code=1)
full_output("the page of a plan", "256k", 4096, *PAGE, code=2)

kind("stdout")


def stdout(shell: str, *command: str) -> None:
    """A command says that nothing was written; a run goes on, or ends with a word and no checkpoint lost."""

    @fault(f"stdout: {' '.join(command)} {shell}")
    def _(p: Place) -> None:
        p.base("shards")
        ended = p.python("-m", f"meshtrain.{command[0]}", *command[1:], shell=shell)
        if command != TRAIN:
            if ended.code == 0:
                raise Silent("exit code 0 though nothing was written")
            return
        p.intact(2, 4, 6)
        if p.last_step() == STEPS:
            p.undisturbed("shards")
            p.intact(STEPS)
        elif not ended.sentences:
            raise Silent(f"exit code {ended.code} without a word")


for words in (
    "plan --config config.yaml",
    "train --config config.yaml --print-config",
    "checkpoint ls run",
    "checkpoint verify run",
    "data verify shards",
    "train --config config.yaml",
):
    stdout("> /dev/full", *words.split())
stdout(">&-", *TRAIN)
stdout("| head -1", *TRAIN)


def failing_stdout(number: int) -> None:
    @fault(f"a write to stdout fails with {os.strerror(number)}: train goes on")
    def _(p: Place) -> None:
        def before() -> None:
            class Fails(io.RawIOBase):
                writable = lambda self: True
                fileno = lambda self: 1

                def write(self, content: object) -> int:
                    raise OSError(number, os.strerror(number))

            buffered = io.BufferedWriter(Fails())
            sys.stdout = io.TextIOWrapper(buffered, line_buffering=True)

        p.base()
        ended = p.train(before=before)
        if ended.code not in (0, 1):
            raise Unclear(f"exit code {ended.code}: {last_line(ended.err)}")
        p.undisturbed()


for number in (errno.EDQUOT, errno.EIO, errno.EAGAIN):
    failing_stdout(number)


# --- limits
kind("limit")


def limited(name: str, limit: int, most: int, must_fail: bool) -> None:
    @fault(name)
    def _(p: Place) -> None:
        def before() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself has it
            resource.setrlimit(limit, (most, most))

        p.base()
        checkpoints = p.digests(p.checkpoints)
        ended = p.train(before=before)
        if ended.code or must_fail:
            failed(ended, silent="exit code 0 without a checkpoint")
        else:
            p.undisturbed()
        p.survive(checkpoints)
        p.intact(2, 4, 6)


limited("files of at most 30 kB (ulimit -f)", resource.RLIMIT_FSIZE, 30_000, True)
limited("few files may be open (ulimit -n 40)", resource.RLIMIT_NOFILE, 40, False)


# --- permissions, as another user
kind("permission")


def forbidden(
    path: str,
    bits: int,
    *words: str,
    base: str = "synthetic",
    root: bool = False,
    without: str = "",
) -> None:
    """As nobody, with other permissions, perhaps under root's name: told with these words, and nothing is lost; or
    the run goes on where it could.
    """

    @fault(f"another user: {path} of mode {bits:03o}")
    def _(p: Place) -> None:
        p.base(base)
        user = p.give_to(NOBODY)
        if without:
            shutil.rmtree(p.dir / without)
        if root:
            os.chown(p.dir / path, 0, 0)
        (p.dir / path).chmod(bits)
        before = p.digests(p.checkpoints)
        ended = p.train(user=user)
        if ended.code == 0:
            resumed(ended, LAST)
            p.undisturbed(base)
        else:
            failed(ended, *words)
            if p.metrics.exists():
                keeps_rows(p)
        p.survive(before)


DENIED = "permission"
forbidden("config.yaml", 0, "config.yaml", DENIED)
forbidden("run", 0o555, "run.directory", DENIED)
forbidden("run", 0o600, "run", DENIED)
forbidden(".", 0o555, "run.directory", DENIED, root=True, without="run")
forbidden("run/checkpoints", 0, "checkpoints", DENIED)
forbidden("run/checkpoints", 0o555, DENIED)
forbidden("run/metrics.jsonl", 0o444, "metrics.jsonl", DENIED, root=True)
forbidden("run/config.yaml", 0o444, root=True)
forbidden("run/.lock", 0o444, "lock|run", DENIED, root=True)
forbidden("text", 0, "text", DENIED, base="text")
forbidden("cache", 0, "cache", DENIED, base="text")
forbidden("shards/manifest.json", 0, "manifest", DENIED, base="shards")
forbidden("shards/train-00000.tokens", 0, "train-00000", DENIED, base="shards")


@fault("another user: no home and no cache directory")
def no_home(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    env = {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}
    refused(p.train(env=env, user=p.give_to(NOBODY)), "XDG_CACHE_HOME")


@fault("another user: reads root's run with ls, show, verify, and writes nothing")
def others_run(p: Place) -> None:
    p.base()
    p.give_to(0)
    for command in ("ls", "show", "verify"):
        done(p.command("checkpoint", command, "run", user=NOBODY))
