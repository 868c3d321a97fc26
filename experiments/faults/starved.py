"""Full disks, no inodes, read-only disks, and files of another user: at each kind of file that a run writes."""

import errno
import fcntl
import os
import resource
import shutil
import signal
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
    refuses,
    resumed,
    went_on,
    with_settings,
)

READS = ("ls run", "show run", "verify run")
TIDY = ("checkpoint.keep=1", "checkpoint.keep_best=0")
TRAIN = ("-m", "meshtrain.train", "--config", "config.yaml")


# --- a run on a full disk
kind("full-disk")


@fault("a new run on a disk that is full")
def new_run(p: Place) -> None:
    p.mount(p.run, "size=64k")
    p.fill(p.run)
    refused(p.train(), "no space", "run")
    if not (p.run / ".filler").exists():
        raise Silent("it removed what was not its own")


def steps(p: Place) -> list[int]:
    return [row["step"] for row in p.rows()]


def resumed_full(name: str, leave: int, torn: bool = False) -> None:
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
        if steps(p)[:LAST] != list(range(1, LAST + 1)):
            raise Silent(f"metrics.jsonl has steps {steps(p)}")
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
    if steps(p) != list(range(1, 61)):
        raise Silent("metrics.jsonl lacks rows")


@fault("the disk is full from the fifth step on")
def full_to_the_end(p: Place) -> None:
    p.mount(p.run, "size=4m")
    ended = sixty(p, lambda: p.fill(p.run)).end().checked()
    failed(ended, "no space", "rows", codes=(1,))


# --- no inodes
kind("no-inodes")


def inodes(name: str, count: int, resumes: bool = False) -> None:
    """The disk has `count` inodes; at a resume, so many more than are used."""

    @fault(f"no inodes: {name}")
    def _(p: Place) -> None:
        used = 0
        if resumes:
            p.base()
            used = (
                sum(len(folders) + len(files) for _, folders, files in os.walk(p.run))
                + 1
            )
        p.mount(p.run, f"size=8m,nr_inodes={used + count}")
        failed(p.train(), "no space")


inodes("a new run", 2)
inodes("in the first checkpoint", 10)
inodes("in a checkpoint's arrays", 14)
inodes("after a resume", 4, resumes=True)


# --- read-only
kind("read-only")


def remounted(folder: str) -> Callable[[Place], object]:
    return lambda p: p.remount_read_only(p.dir / folder)


def no_cache(p: Place) -> None:
    shutil.rmtree(p.dir / "cache")
    (p.dir / "cache").mkdir()
    p.remount_read_only(p.dir / "cache")


refuses(
    "the run directory is remounted read-only before a resume",
    with_settings(),
    "read-only",
    "run.directory",
    base="synthetic",
    arrange=remounted("run"),
)
refuses(
    "a cache on a read-only disk, that lacks what is needed",
    with_settings(),
    "read-only",
    "XDG_CACHE_HOME",
    base="packed",
    arrange=no_cache,
)
goes_on("text on a read-only disk", remounted("text"), base="text")
goes_on(
    "a cache on a read-only disk, that has what is needed",
    remounted("cache"),
    base="packed",
)


@fault("checkpoints/ is read-only, the rest is not")
def read_only_checkpoints(p: Place) -> None:
    p.base()
    before = p.digests(p.checkpoints)
    p.remount_read_only(p.checkpoints)
    failed(p.train(), "read-only", silent="exit code 0 without a checkpoint")
    p.survive(before)
    p.undisturbed(upto=p.last_step())


kind("disk-fails")


@fault("the disk fails while training: every read and write is an error")
def disk_fails(p: Place) -> None:
    """A real file system, which a remount could not make read-only under open files; shut down, it refuses all."""
    image = p.dir / "disk"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    if (
        not shutil.which("mkfs.ext4")
        or subprocess.run(["mkfs.ext4", "-q", image]).returncode
    ):
        raise NotTried("mkfs.ext4 is not installed (Debian: apt install e2fsprogs)")
    p.mount(p.run, "size=8k")
    if subprocess.run(
        ["mount", "-o", "loop", image, p.run], stderr=subprocess.DEVNULL
    ).returncode:
        raise NotTried("a loop device may not be mounted here")

    def shut_down() -> None:
        descriptor = os.open(p.run, os.O_RDONLY)
        try:
            # EXT4_IOC_SHUTDOWN, without writing the journal.
            fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))
        finally:
            os.close(descriptor)

    failed(sixty(p, shut_down).end().checked(), "input/output error", codes=(1,))


kind("read-only")


@fault("reading checkpoints from a read-only disk: ls, show, verify, diff")
def read_only_reading(p: Place) -> None:
    p.base()
    p.remount_read_only(p.run)
    for command in (*READS, "diff run/checkpoints/4 run/checkpoints/4"):
        done(p.command("checkpoint", *command.split()))


@fault("a run that starts from another's checkpoints on a read-only disk")
def read_only_source(p: Place) -> None:
    p.base()
    os.rename(p.run, p.dir / "other")
    p.remount_read_only(p.dir / "other")
    ended = p.train("checkpoint.resume=other")
    done(ended)
    resumed(ended, LAST)


# --- a full disk at each kind of file
kind("full-cache")


def full_cache(name: str, base: str, leave: int, keep: str = "") -> None:
    """The cache's disk is full but for `leave` bytes; `keep` is the part of the cache that is there already."""

    @fault(f"a full disk at {name}")
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
full_cache("the table of lengths, packed", "packed", 0, keep="text")
full_cache(
    "the table of lengths, packed, with room for its first page",
    "packed",
    4096,
    keep="text",
)


def full_output(name: str, leave: int) -> None:
    @fault(f"a full disk at prepared shards, {name}")
    def _(p: Place) -> None:
        folder(p)
        p.mount(p.dir / "disk", "size=1m")
        p.fill(p.dir / "disk", leave)
        arguments = (
            "prepare",
            "--input",
            "text",
            "--output",
            "disk/shards",
            "--workers",
            "1",
        )
        ended = p.command("data", *arguments)
        refused(ended, "no space", "disk", code=1)
        if "a file: " in ended.err:
            raise Unclear(last_line(ended.err))
        (p.dir / "disk/.filler").unlink()
        done(p.command("data", *arguments))
        done(p.command("data", "verify", "disk/shards"))


kind("full-output")
full_output("with no room at all", 0)
full_output("with room for a part", 16_384)
full_output("with room for all but the manifest", 32_768)


@fault("a full disk at a tokenizer that is trained")
def full_tokenizer(p: Place) -> None:
    folder(p)
    p.mount(p.dir / "disk", "size=256k")
    p.fill(p.dir / "disk", 4096)
    words = ("--input", "text", "--vocab-size", "400", "--output", "disk/t.json")
    refused(p.command("data", "train-tokenizer", *words), "no space", code=1)
    if (p.dir / "disk/t.json").exists():
        raise Silent("half a tokenizer.json is left")


kind("stdout")


def full_output_stream(*command: str) -> None:
    @fault(f"stdout is a full disk: {' '.join(command)}")
    def _(p: Place) -> None:
        p.base("shards")
        ended = p.python(
            "-m", f"meshtrain.{command[0]}", *command[1:], shell="> /dev/full"
        )
        if ended.code == 0:
            raise Silent("exit code 0 though nothing was written")


full_output_stream("plan", "--config", "config.yaml")
full_output_stream("train", "--config", "config.yaml", "--print-config")
full_output_stream("checkpoint", "ls", "run")
full_output_stream("checkpoint", "verify", "run")
full_output_stream("data", "verify", "shards")


def stdout(name: str, shell: str) -> None:
    """The run goes on, or ends with a word and no checkpoint lost."""

    @fault(f"stdout {name}: train goes on, or stops with a checkpoint")
    def _(p: Place) -> None:
        p.base()
        ended = p.python(*TRAIN, shell=shell)
        p.intact(2, 4, 6)
        if p.last_step() == STEPS:
            p.undisturbed()
            p.intact(STEPS)
        elif not ended.sentences:
            raise Silent(f"exit code {ended.code} without a word")


stdout("is a full disk", "> /dev/full")
stdout("is closed", ">&-")
stdout("has a reader that goes away", "| head -1")


def failing_stdout(number: int) -> None:
    @fault(f"a write to stdout fails with {os.strerror(number)}: train goes on")
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

            sys.stdout = io.TextIOWrapper(
                io.BufferedWriter(Fails()), line_buffering=True
            )

        p.base()
        ended = p.train(before=before)
        if ended.code not in (0, 1):
            raise Unclear(f"exit code {ended.code}: {last_line(ended.err)}")
        p.undisturbed()


for number in (errno.EDQUOT, errno.ENOSPC, errno.EIO, errno.EAGAIN):
    failing_stdout(number)


# --- limits
kind("limit")


def limited(name: str, limit: str, most: int, must_fail: bool) -> None:
    @fault(name)
    def _(p: Place) -> None:
        def before() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself has it
            resource.setrlimit(getattr(resource, limit), (most, most))

        p.base()
        before_it = p.digests(p.checkpoints)
        ended = p.train(before=before)
        if ended.code or must_fail:
            failed(ended, silent="exit code 0 without a checkpoint")
        else:
            p.undisturbed()
        p.survive(before_it)
        p.intact(2, 4, 6)


limited(
    "a limit on the size of files (ulimit -f)", "RLIMIT_FSIZE", 30_000, must_fail=True
)
limited("few files may be open (ulimit -n 40)", "RLIMIT_NOFILE", 40, must_fail=False)


# --- permissions, as another user
kind("permission")


def forbidden(
    name: str, act: Callable[[Place], object], *words: str, base: str = "synthetic"
) -> None:
    """As nobody: told with these words, and nothing is lost; or the run goes on where it could.

    A step that may not be read is neither set aside nor passed over.
    """

    @fault(f"another user: {name}")
    def _(p: Place) -> None:
        p.base(base)
        user = p.give_to(NOBODY)
        act(p)
        before = p.digests(p.checkpoints)
        ended = p.train(user=user)
        if ended.code == 0:
            resumed(ended, LAST)
            p.undisturbed(base)
        else:
            failed(ended, *words)
            if p.metrics.exists() and steps(p)[:LAST] != list(range(1, LAST + 1)):
                raise Silent("rows are lost")
        p.survive(before)


def mode(path: str, bits: int = 0, root: bool = False) -> Callable[[Place], object]:
    """Other permissions, and perhaps another owner."""

    def act(p: Place) -> None:
        if root:
            os.chown(p.dir / path, 0, 0)
        (p.dir / path).chmod(bits)

    return act


def no_parent(p: Place) -> None:
    shutil.rmtree(p.run)
    mode(".", 0o555, root=True)(p)


DENIED = "permission"
forbidden("the config file cannot be read", mode("config.yaml"), "config.yaml", DENIED)
forbidden(
    "the run directory cannot be written", mode("run", 0o555), "run.directory", DENIED
)
forbidden("the run directory cannot be entered", mode("run", 0o600), "run", DENIED)
forbidden(
    "the run directory's parent cannot be written", no_parent, "run.directory", DENIED
)
forbidden("checkpoints/ cannot be read", mode("run/checkpoints"), "checkpoints", DENIED)
forbidden("checkpoints/ cannot be written", mode("run/checkpoints", 0o555), DENIED)
for file, words in (
    ("metrics.jsonl", ("metrics.jsonl", DENIED)),
    ("config.yaml", ()),
    (".lock", ("lock|run", DENIED)),
):
    forbidden(
        f"{file} of the run cannot be written", mode(f"run/{file}", 0o444, True), *words
    )
forbidden(
    "metrics.jsonl cannot be read", mode("run/metrics.jsonl"), "metrics.jsonl", DENIED
)
for file in ("COMMIT", "digests.json", "manifest.json", "arrays"):
    forbidden(
        f"{file} of the newest step cannot be read",
        mode(f"run/checkpoints/6/{file}"),
        file,
    )
forbidden("the newest step cannot be entered", mode("run/checkpoints/6"), "6")
for base, file in (
    ("text", "text"),
    ("text", "cache"),
    ("shards", "shards/manifest.json"),
    ("shards", "shards/train-00000.tokens"),
):
    word = file.rpartition("/")[2].partition(".")[0]
    forbidden(f"{file} cannot be read", mode(file), word, DENIED, base=base)


@fault("another user: no home and no cache directory")
def no_home(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    user = p.give_to(NOBODY)
    env = {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}
    refused(p.train(env=env, user=user), "XDG_CACHE_HOME")


@fault("another user: reads root's run with ls, show, verify, and writes nothing")
def others_run(p: Place) -> None:
    p.base()
    p.give_to(0)
    for command in READS:
        done(p.command("checkpoint", *command.split(), user=NOBODY))


@fault("another user: an old step that cannot be removed by retention")
def sticky(p: Place) -> None:
    p.base()
    user = p.give_to(NOBODY)
    os.chown(p.checkpoints / "2", 0, 0)
    (p.checkpoints / "2").chmod(0o555)
    ended = p.train(*TIDY, user=user)
    went_on(p, ended)
    if "cannot be removed" not in ended.err and (p.checkpoints / "2").exists():
        raise Silent("a step that need not stay stays without a word")
    done(p.train(*TIDY, "train.steps=10", user=user))


@fault("another user: a leftover of root's that cannot be removed")
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


@fault("another user: text of which one file cannot be read")
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
