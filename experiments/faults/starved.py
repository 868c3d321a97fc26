"""Full disks, no inodes, read-only disks, and files of another user: at each kind of file that a run writes."""

import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable

from experiments.faults.bases import folder
from experiments.faults.harness import (
    LAST,
    NOBODY,
    STEPS,
    NotTried,
    Place,
    Silent,
    Unclear,
    contains,
    done,
    failed,
    fault,
    kind,
    last_line,
    losses,
    refused,
    resumed,
    went_on,
)

ROOM = "starved"


# --- a run on a full disk (point 9)
kind("full-disk")


@fault(ROOM, "a new run on a disk that is full", "9")
def new_run(p: Place) -> None:
    p.mount(p.run, "size=64k")
    p.fill(p.run)
    refused(p.train(), "no space", "run")
    room = p.run / ".filler"
    if not room.exists():
        raise Silent("it removed what was not its own")


def resumed_full(name: str, leave: int, torn: bool = False) -> None:
    @fault(ROOM, f"a resume on a disk {name}", "9")
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
        if [row["step"] for row in p.rows()][:LAST] != list(range(1, LAST + 1)):
            raise Silent(f"metrics.jsonl has steps {[row['step'] for row in p.rows()]}")
        # With room again, the same command ends the run as if nothing had been.
        (p.run / ".filler").unlink(missing_ok=True)
        done(p.train())
        p.undisturbed()
        p.intact(STEPS)


resumed_full("that is full", 0)
resumed_full("that is full, with a torn row", 0, torn=True)
resumed_full("with room for 4 kB", 4096)
resumed_full("with room for half a checkpoint", 100_000)
resumed_full("with room for all but the digests", 206_000)


@fault(ROOM, "the disk fills while training, and has room again before the end")
def fills(p: Place) -> None:
    p.mount(p.run, "size=4m")
    running = p.training("train.steps=60", "checkpoint.every=20")
    running.until(lambda: p.last_step() >= 5)
    with running.frozen():
        p.fill(p.run)
    running.until(
        lambda: (
            "could not be written" in running.log.with_suffix(".err").read_text()
            or not running.alive()
        )
    )
    with running.frozen():
        (p.run / ".filler").unlink()
    ended = running.end().checked()
    done(ended, "could not be written")
    p.intact(60)
    if [row["step"] for row in p.rows()] != list(range(1, 61)):
        raise Silent("metrics.jsonl lacks rows")


@fault(ROOM, "the disk is full from the fifth step on", "9")
def full_to_the_end(p: Place) -> None:
    p.mount(p.run, "size=4m")
    running = p.training("train.steps=60", "checkpoint.every=20")
    running.until(lambda: p.last_step() >= 5)
    with running.frozen():
        p.fill(p.run)
    ended = running.end().checked()
    failed(ended, codes=(1,))
    done(ended, "no space", "rows", code=1)


# --- no inodes
kind("no-inodes")


def inodes(name: str, count: int, resumes: bool = False) -> None:
    """The disk has `count` inodes; at a resume, so many more than are used."""

    @fault(ROOM, f"no inodes: {name}")
    def _(p: Place) -> None:
        used = 0
        if resumes:
            p.base()
            used = sum(len(folders) + len(files) for _, folders, files in os.walk(p.run)) + 1
        p.mount(p.run, f"size=8m,nr_inodes={used + count}")
        failed(p.train(), "no space")


inodes("a new run", 2)
inodes("in the first checkpoint", 10)
inodes("in a checkpoint's arrays", 14)
inodes("after a resume", 4, resumes=True)


# --- read-only
kind("read-only")


@fault(ROOM, "the run directory is remounted read-only before a resume")
def read_only(p: Place) -> None:
    p.base()
    before = p.digests(p.run)
    p.remount_read_only(p.run)
    refused(p.train(), "read-only", "run.directory")
    p.survive(before)


@fault(ROOM, "checkpoints/ is read-only, the rest is not")
def read_only_checkpoints(p: Place) -> None:
    p.base()
    before = p.digests(p.checkpoints)
    p.remount_read_only(p.checkpoints)
    failed(p.train(), "read-only", silent="exit code 0 without a checkpoint")
    p.survive(before)
    expected = losses(p.bases / "synthetic/run/metrics.jsonl")
    steps = [row["step"] for row in p.rows()]
    if steps != sorted(set(steps)) or any(row["loss"] != expected[row["step"]] for row in p.rows()):
        raise Silent(f"metrics.jsonl has steps {steps}, or other losses")


kind("disk-fails")


@fault(ROOM, "the disk fails while training: every read and write is an error")
def disk_fails(p: Place) -> None:
    """A real file system, which a remount could not make read-only under open files; shut down, it refuses all."""
    image = p.dir / "disk"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    if not shutil.which("mkfs.ext4") or subprocess.run(["mkfs.ext4", "-q", image]).returncode:
        raise NotTried("mkfs.ext4 is not installed (Debian: apt install e2fsprogs)")
    p.mount(p.run, "size=8k")
    if subprocess.run(["mount", "-o", "loop", image, p.run], stderr=subprocess.DEVNULL).returncode:
        raise NotTried("a loop device may not be mounted here")
    running = p.training("train.steps=60", "checkpoint.every=20")
    running.until(lambda: p.last_step() >= 5)
    descriptor = os.open(p.run, os.O_RDONLY)
    try:
        # EXT4_IOC_SHUTDOWN, without writing the journal.
        fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))
    finally:
        os.close(descriptor)
    failed(running.end().checked(), "input/output error", codes=(1,))


kind("read-only")


@fault(ROOM, "reading checkpoints from a read-only disk: ls, show, verify, diff")
def read_only_reading(p: Place) -> None:
    p.base()
    p.remount_read_only(p.run)
    for arguments in (
        ["ls", "run"],
        ["show", "run"],
        ["verify", "run"],
        ["diff", "run/checkpoints/4", "run/checkpoints/4"],
    ):
        done(p.command("checkpoint.__main__", *arguments))


@fault(ROOM, "a run that starts from another's checkpoints on a read-only disk")
def read_only_source(p: Place) -> None:
    p.base()
    os.rename(p.run, p.dir / "other")
    p.remount_read_only(p.dir / "other")
    ended = p.train("checkpoint.resume=other")
    done(ended)
    resumed(ended, LAST)


def read_only_input(name: str, base: str, folder: str) -> None:
    @fault(
        ROOM,
        f"{name} on a read-only disk{', that has what is needed' if folder == 'cache' else ''}",
    )
    def _(p: Place) -> None:
        p.base(base)
        p.remount_read_only(p.dir / folder)
        done(p.train())
        p.undisturbed(base)


read_only_input("text and shards", "text", "text")
read_only_input("a cache", "packed", "cache")


@fault(ROOM, "a cache on a read-only disk, that lacks what is needed")
def read_only_empty_cache(p: Place) -> None:
    p.base("packed")
    shutil.rmtree(p.dir / "cache")
    (p.dir / "cache").mkdir()
    p.remount_read_only(p.dir / "cache")
    refused(p.train(), "read-only", "XDG_CACHE_HOME")


# --- a full disk at each kind of file
kind("full-cache")


def full_cache(name: str, base: str, leave: int, keep: str = "", point: str = "") -> None:
    """The cache's disk is full but for `leave` bytes; `keep` is the part of the cache that is there already."""

    @fault(ROOM, f"a full disk at {name}", point)
    def _(p: Place) -> None:
        p.base(base)
        for path in sorted((p.dir / "cache/meshtrain").iterdir()):
            if not keep or not path.name.startswith(keep):
                shutil.rmtree(path)
        p.mount(p.dir / "cache", "size=1m")
        p.fill(p.dir / "cache", leave)
        before = p.digests(p.run)
        refused(p.train(), "no space", "XDG_CACHE_HOME")
        p.survive(before)
        (p.dir / "cache/.filler").unlink()
        done(p.train())
        p.undisturbed(base)


full_cache("the cached shards, with no room at all", "text", 0)
full_cache("the cached shards, with room for a part of them", "text", 16_384)
full_cache("the table of lengths, packed", "packed", 0, keep="text", point="9")
full_cache(
    "the table of lengths, packed, with room for its first page",
    "packed",
    4096,
    keep="text",
    point="9",
)


def full_output(name: str, leave: int, point: str = "") -> None:
    @fault(ROOM, f"a full disk at prepared shards, {name}", point)
    def _(p: Place) -> None:
        folder(p)
        p.mount(p.dir / "disk", "size=1m")
        p.fill(p.dir / "disk", leave)
        arguments = ("prepare", "--input", "text", "--output", "disk/shards", "--workers", "1")
        ended = p.command("data.__main__", *arguments)
        refused(ended, "no space", "disk", code=1)
        if "a file: " in ended.err:
            raise Unclear(last_line(ended.err))
        (p.dir / "disk/.filler").unlink()
        done(p.command("data.__main__", *arguments))
        done(p.command("data.__main__", "verify", "disk/shards"))


kind("full-output")
full_output("with no room at all", 0, "13")
full_output("with room for a part", 16_384, "13")
full_output("with room for all but the manifest", 32_768, "13")


@fault(ROOM, "a full disk at a tokenizer that is trained")
def full_tokenizer(p: Place) -> None:
    folder(p)
    p.mount(p.dir / "disk", "size=256k")
    p.fill(p.dir / "disk", 4096)
    ended = p.command(
        "data.__main__",
        "train-tokenizer",
        "--input",
        "text",
        "--vocab-size",
        "400",
        "--output",
        "disk/t.json",
    )
    if ended.code == 0:
        raise Silent("exit code 0")
    refused(ended, "no space", code=1)
    if (p.dir / "disk/t.json").exists():
        raise Silent("half a tokenizer.json is left")


def full_output_stream(name: str, module: str, *arguments: str) -> None:
    @fault(ROOM, f"stdout is a full disk: {name}")
    def _(p: Place) -> None:
        p.base("shards")
        ended = p.python("-m", f"meshtrain.{module}", *arguments, shell="> /dev/full")
        if ended.code == 0:
            raise Silent("exit code 0 though nothing was written")


kind("stdout")
full_output_stream("plan", "plan", "--config", "config.yaml")
full_output_stream("--print-config", "train", "--config", "config.yaml", "--print-config")
full_output_stream("checkpoint ls", "checkpoint", "ls", "run")
full_output_stream("checkpoint verify", "checkpoint", "verify", "run")
full_output_stream("data verify", "data", "verify", "shards")


@fault(ROOM, "stdout is a full disk: train goes on, or stops with a checkpoint")
def full_stdout(p: Place) -> None:
    p.base()
    ended = p.python("-m", "meshtrain.train", "--config", "config.yaml", shell="> /dev/full")
    if ended.code == 0:
        p.undisturbed()
        p.intact(STEPS)
    elif not ended.sentences:
        raise Unclear(f"exit code {ended.code} without a word")
    p.intact(2, 4, 6)


def failing_stdout(number: int) -> None:
    @fault(ROOM, f"a write to stdout fails with {os.strerror(number)}: train goes on")
    def _(p: Place) -> None:
        def before() -> None:
            import io
            import sys

            class Fails(io.RawIOBase):
                def writable(self) -> bool:
                    return True

                def fileno(self) -> int:
                    return 1

                def write(self, content: object) -> int:
                    raise OSError(number, os.strerror(number))

            sys.stdout = io.TextIOWrapper(io.BufferedWriter(Fails()), line_buffering=True)

        p.base()
        ended = p.train(before=before)
        if ended.code not in (0, 1):
            raise Unclear(f"exit code {ended.code}: {last_line(ended.err)}")
        p.undisturbed()


for number in (errno.EDQUOT, errno.ENOSPC, errno.EIO, errno.EAGAIN):
    failing_stdout(number)


@fault(ROOM, "stdout is closed: train goes on")
def closed_stdout(p: Place) -> None:
    p.base()
    ended = p.python("-m", "meshtrain.train", "--config", "config.yaml", shell=">&-")
    if ended.code == 0:
        p.undisturbed()
        p.intact(STEPS)
    else:
        refused(ended, code=1)


@fault(ROOM, "the reader of stdout goes away: train goes on, or stops with a checkpoint")
def pipe(p: Place) -> None:
    p.base()
    ended = p.python("-m", "meshtrain.train", "--config", "config.yaml", shell="| head -1")
    p.intact(2, 4, 6)
    if p.last_step() == STEPS:
        p.undisturbed()
        p.intact(STEPS)
    elif not ended.sentences:
        raise Silent("it ended without a word")


# --- limits
kind("limit")


@fault(ROOM, "a limit on the size of files (ulimit -f)")
def file_size(p: Place) -> None:
    def limit() -> None:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself has it
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    p.base()
    before = p.digests(p.checkpoints)
    failed(p.train(before=limit), silent="exit code 0 without a checkpoint")
    p.survive(before)
    p.intact(2, 4, 6)


@fault(ROOM, "few files may be open (ulimit -n 40)")
def open_files(p: Place) -> None:
    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    p.base()
    before = p.digests(p.checkpoints)
    ended = p.train(before=limit)
    if ended.code == 0:
        p.undisturbed()
    else:
        failed(ended)
    p.survive(before)


# --- permissions, as another user
kind("permission")


def forbidden(
    name: str,
    act: Callable[[Place], object],
    *words: str,
    base: str = "synthetic",
    settings: tuple[str, ...] = (),
    goes_on: int | None = None,
) -> None:
    """As nobody.

    Told with these words, nothing is lost; or the run goes on after step `goes_on` (6: it could), having said them.

    A step that may not be read is neither set aside nor passed over.
    """

    @fault(
        ROOM,
        f"another user: {name}",
        "9" if "metrics.jsonl" in name else "10" if "COMMIT" in name else "",
    )
    def _(p: Place) -> None:
        p.base(base)
        user = p.give_to(NOBODY)
        act(p)
        before = p.digests(p.checkpoints)
        ended = p.train(*settings, user=user)
        if ended.code == 0:
            resumed(ended, LAST if goes_on is None else goes_on)
            if goes_on is not None:
                done(ended, *words)
            p.undisturbed(base)
        else:
            if any(not line.startswith("meshtrain: ") for line in ended.sentences):
                raise Unclear(last_line(ended.err))
            contains(ended.err, *words)
            if [row["step"] for row in p.rows()][:LAST] != list(
                range(1, LAST + 1)
            ) and p.metrics.exists():
                raise Silent("rows are lost")
        p.survive(before)


def mode(path: str, bits: int) -> Callable[[Place], object]:
    return lambda p: (p.dir / path).chmod(bits)


def roots(path: str, bits: int) -> Callable[[Place], object]:
    def act(p: Place) -> None:
        os.chown(p.dir / path, 0, 0)
        (p.dir / path).chmod(bits)

    return act


forbidden("the config file cannot be read", mode("config.yaml", 0), "config.yaml", "permission")
forbidden("the run directory cannot be written", mode("run", 0o555), "run.directory", "permission")
forbidden("the run directory cannot be entered", mode("run", 0o600), "run", "permission")
forbidden(
    "the run directory's parent cannot be written",
    lambda p: (shutil.rmtree(p.run), p.dir.chmod(0o555), os.chown(p.dir, 0, 0)),
    "run.directory",
    "permission",
)
forbidden("checkpoints/ cannot be read", mode("run/checkpoints", 0), "checkpoints", "permission")
forbidden("checkpoints/ cannot be written", mode("run/checkpoints", 0o555), "permission")
forbidden(
    "metrics.jsonl cannot be written",
    roots("run/metrics.jsonl", 0o444),
    "metrics.jsonl",
    "permission",
)
forbidden(
    "metrics.jsonl cannot be read", mode("run/metrics.jsonl", 0), "metrics.jsonl", "permission"
)
forbidden("config.yaml of the run cannot be written", roots("run/config.yaml", 0o444), goes_on=LAST)
forbidden(".lock cannot be written", roots("run/.lock", 0o444), "lock|run", "permission")
forbidden("COMMIT of the newest step cannot be read", mode("run/checkpoints/6/COMMIT", 0), "COMMIT")
forbidden(
    "digests.json of the newest step cannot be read",
    mode("run/checkpoints/6/digests.json", 0),
    "digests.json",
)
forbidden(
    "manifest.json of the newest step cannot be read",
    mode("run/checkpoints/6/manifest.json", 0),
    "manifest.json",
)
forbidden(
    "arrays/ of the newest step cannot be read", mode("run/checkpoints/6/arrays", 0), "arrays"
)
forbidden("the newest step cannot be entered", mode("run/checkpoints/6", 0), "6")
forbidden("the text cannot be read", mode("text", 0), "text", "permission", base="text")
forbidden(
    "the shards' manifest cannot be read",
    mode("shards/manifest.json", 0),
    "manifest",
    "permission",
    base="shards",
)
forbidden(
    "the shards' tokens cannot be read",
    mode("shards/train-00000.tokens", 0),
    "train-00000",
    "permission",
    base="shards",
)
forbidden("the cache cannot be read", mode("cache", 0), "cache", "permission", base="text")


@fault(ROOM, "another user: no home and no cache directory")
def no_home(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    user = p.give_to(NOBODY)
    env = {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}
    refused(p.training(env=env, user=user).end().checked(), "XDG_CACHE_HOME")


@fault(ROOM, "another user: reads root's run with ls, show, verify, and writes nothing")
def others_run(p: Place) -> None:
    p.base()
    p.give_to(0)
    for arguments in (["ls", "run"], ["show", "run"], ["verify", "run"]):
        done(p.command("checkpoint.__main__", *arguments, user=NOBODY))


@fault(ROOM, "another user: an old step that cannot be removed by retention")
def sticky(p: Place) -> None:
    p.base()
    user = p.give_to(NOBODY)
    os.chown(p.checkpoints / "2", 0, 0)
    (p.checkpoints / "2").chmod(0o555)
    ended = p.train("checkpoint.keep=1", "checkpoint.keep_best=0", user=user)
    went_on(p, ended)
    if "cannot be removed" not in ended.err and (p.checkpoints / "2").exists():
        raise Silent("a step that need not stay stays without a word")
    done(p.train("checkpoint.keep=1", "checkpoint.keep_best=0", "train.steps=10", user=user))


@fault(ROOM, "another user: a leftover of root's that cannot be removed")
def others_leftover(p: Place) -> None:
    p.base()
    user = p.give_to(NOBODY)
    left = p.checkpoints / "8.writing"
    left.mkdir()
    (left / "x").write_text("x")
    os.chown(left, 0, 0)
    left.chmod(stat.S_IRWXU)
    ended = p.train(user=user)
    if ended.code == 0:
        resumed(ended, LAST)
        p.undisturbed()
    else:
        refused(ended, "8.writing", code=ended.code if ended.code in (1, 2) else 2)


@fault(ROOM, "another user: text of which one file cannot be read")
def one_file(p: Place) -> None:
    folder(p)
    p.config(data={"source": "text"})
    user = p.give_to(NOBODY)
    (p.dir / "text/03.txt").chmod(0)
    ended = p.train(user=user)
    if ended.code == 0:
        if "03.txt" not in ended.said and "skipped" not in ended.said:
            raise Silent("a file is left out without a word")
    else:
        refused(ended, "03.txt|text")
