"""What surrounds a process: its environment, its clock, its streams, its working directory, its warnings."""

import glob
import os
import shutil

from experiments.faults.bases import folder
from experiments.faults.harness import (
    LAST,
    REPOSITORY,
    NotTried,
    Place,
    Silent,
    Unclear,
    done,
    failed,
    fault,
    kind,
    last_line,
    refused,
    resumed,
    went_on,
)

ROOM = "surroundings"
TRAIN = ("-m", "meshtrain.train", "--config", "config.yaml")


def environment(
    name: str,
    env: dict[str, str | None],
    *words: str,
    refuses: bool = False,
    point: str = "",
    quiet: bool = False,
    base: str = "synthetic",
    early: bool = True,
) -> None:
    """`early`: what Python or JAX reads when it is imported, so that it needs a new process."""

    @fault(ROOM, name, point)
    def _(p: Place) -> None:
        p.base(base)
        # Other flags would compile another program, with other roundings.
        flags = (
            {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {env['XLA_FLAGS']}"}
            if env.get("XLA_FLAGS")
            else {}
        )
        if early:
            ended = p.python(*TRAIN, env=env | flags)
        else:
            ended = p.train(before=lambda: changed(env | flags))
        if refuses:
            refused(ended, *words)
            return
        if ended.code:
            refused(ended, *words)
            raise Unclear(f"refused: {last_line(ended.err)}")
        done(ended, *words, quiet=quiet)
        resumed(ended, LAST)
        p.undisturbed(base)


kind("environment")


def changed(env: dict[str, str | None]) -> None:
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


environment("PYTHONWARNINGS=error", {"PYTHONWARNINGS": "error"}, point="11")
environment("python -X dev: every warning is shown", {"PYTHONDEVMODE": "1"}, point="11")
environment("PYTHONOPTIMIZE=2: no asserts, no docstrings", {"PYTHONOPTIMIZE": "2"})
environment("PYTHONHASHSEED=0", {"PYTHONHASHSEED": "0"})
environment(
    "PYTHONUTF8=0 and LC_ALL=C", {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
)
environment("PYTHONIOENCODING=ascii", {"PYTHONIOENCODING": "ascii:strict"})
environment("LANG of a language that is not installed", {"LANG": "xx_YY.UTF-16", "LC_ALL": "xx_YY"})
environment("TERM=dumb, COLUMNS=1", {"TERM": "dumb", "COLUMNS": "1"}, early=False)
environment("COLUMNS that is a word", {"COLUMNS": "wide"}, early=False)
environment("HOME unset", {"HOME": None}, early=False)
environment("HOME that is not there", {"HOME": "/nonexistent"}, early=False)
environment("XDG_CACHE_HOME empty", {"XDG_CACHE_HOME": ""}, early=False)
environment("XDG_CACHE_HOME relative", {"XDG_CACHE_HOME": "cache"}, base="text", early=False)
environment("TMPDIR that is not there", {"TMPDIR": "/nonexistent"}, early=False)
environment("JAX_ENABLE_X64=1", {"JAX_ENABLE_X64": "1"})
environment("JAX_DEBUG_NANS=1", {"JAX_DEBUG_NANS": "1"})
environment("JAX_TRACEBACK_FILTERING=off", {"JAX_TRACEBACK_FILTERING": "off"})
environment("JAX_DISABLE_JIT=1", {"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT", refuses=True)
environment(
    "JAX_PLATFORMS of an accelerator that is not there",
    {"JAX_PLATFORMS": "cuda"},
    "cuda|JAX_PLATFORMS",
    refuses=True,
)
environment(
    "JAX_PLATFORMS that is a word",
    {"JAX_PLATFORMS": "toaster"},
    "toaster|JAX_PLATFORMS",
    refuses=True,
)
environment(
    "JAX_COMPILATION_CACHE_DIR that cannot be written",
    {"JAX_COMPILATION_CACHE_DIR": "/proc/nowhere"},
)
environment(
    "XLA_FLAGS that are none", {"XLA_FLAGS": "--xla_no_such_flag=1"}, "XLA_FLAGS", refuses=True
)
environment(
    "XLA_FLAGS that fakes 3 devices for a mesh of 1",
    {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
    early=False,
)
environment(
    "XLA_FLAGS that fakes 0 devices", {"XLA_FLAGS": "--xla_force_host_platform_device_count=0"}
)
environment("PJRT_NPROC that is a word", {"PJRT_NPROC": "many"}, early=False)
environment("OMP_NUM_THREADS=1 and one core", {"OMP_NUM_THREADS": "1"}, early=False)
environment(
    "SLURM_NTASKS=1 left over from a job",
    {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"},
    early=False,
)
environment(
    "JAX_NUM_PROCESSES left over, without an address",
    {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    early=False,
)


kind("compilation-cache")


@fault(ROOM, "a damaged compilation cache")
def compiled(p: Place) -> None:
    p.base()
    cache = p.dir / "compiled"
    shutil.copytree(os.environ["JAX_COMPILATION_CACHE_DIR"], cache)
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    ended = p.python(*TRAIN, env={"JAX_COMPILATION_CACHE_DIR": str(cache)})
    went_on(p, ended)


# --- the clock
kind("clock")


@fault(ROOM, "the clock set back by years: every file comes from the future")
def future_files(p: Place) -> None:
    p.base()
    for path in [p.run, *p.run.rglob("*")]:
        os.utime(path, (4_000_000_000, 4_000_000_000))
    ended = p.train("checkpoint.keep=2", "checkpoint.keep_best=0")
    went_on(p, ended)
    p.intact(6, 8)


def faketime() -> str:
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not found:
        raise NotTried("libfaketime is not installed (Debian: apt install faketime)")
    return found[0]


def clock(name: str, when: str) -> None:
    @fault(ROOM, f"the clock {name}")
    def _(p: Place) -> None:
        p.base()
        ended = p.python(
            *TRAIN,
            "--set",
            "checkpoint.keep=2",
            "--set",
            "checkpoint.keep_best=0",
            env={"LD_PRELOAD": faketime(), "FAKETIME": when, "DONT_FAKE_MONOTONIC": "1"},
        )
        went_on(p, ended)
        p.intact(6, 8)
        done(p.command("checkpoint.__main__", "ls", "run"))


clock("set back by ten years", "-3650d")
clock("set back to 1970", "@1970-01-01 00:00:00")
clock("ahead by a hundred years", "+36500d")


@fault(ROOM, "the clock is set back while training")
def back_while_running(p: Place) -> None:
    def before() -> None:
        import time

        real, began = time.time, time.monotonic()
        time.time = lambda: real() - (86_400 if time.monotonic() - began > 0.5 else 0)

    p.base()
    ended = p.train(before=before)
    went_on(p, ended)
    if any(row["step_seconds"] < 0 or row["tokens_per_second"] < 0 for row in p.rows()):
        raise Silent("a step took less than no time")


@fault(ROOM, "text with dates of 1970, of the future and below zero")
def dates(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    for k, path in enumerate(sorted((p.dir / "text").iterdir())):
        os.utime(path, ns=((0, 2**62, -(10**18))[k % 3],) * 2)
    done(p.train())
    p.undisturbed("text")


# --- streams and directories
kind("streams")


@fault(ROOM, "stdin is closed")
def stdin(p: Place) -> None:
    p.base()
    done(p.python(*TRAIN, shell="<&-"))
    p.undisturbed()


@fault(ROOM, "stderr is closed")
def stderr(p: Place) -> None:
    p.base()
    done(p.python(*TRAIN, shell="2>&-"))
    p.undisturbed()


@fault(ROOM, "every stream is closed")
def streams(p: Place) -> None:
    p.base()
    done(p.python(*TRAIN, shell="<&- >&- 2>&-"))
    p.undisturbed()


@fault(ROOM, "stderr is closed, and the config is wrong: the exit code says so")
def stderr_code(p: Place) -> None:
    p.config()
    ended = p.python(*TRAIN, "--set", "mesh.data=x", shell="2>&-")
    if ended.code != 2:
        raise Unclear(f"exit code {ended.code}")


kind("working-directory")


@fault(ROOM, "the working directory is deleted before the start")
def no_directory(p: Place) -> None:
    p.base()
    (p.dir / "here").mkdir()

    def before() -> None:
        os.chdir("here")
        os.rmdir("../here")

    ended = (
        p.start(
            "meshtrain.train",
            "--config",
            str(p.dir / "config.yaml"),
            "--set",
            f"run.directory={p.run}",
            before=before,
        )
        .end()
        .checked()
    )
    went_on(p, ended)


@fault(ROOM, "the working directory is deleted, and run.directory is relative")
def no_directory_relative(p: Place) -> None:
    p.config()
    (p.dir / "here").mkdir()

    def before() -> None:
        os.chdir("here")
        os.rmdir("../here")

    refused(
        p.start("meshtrain.train", "--config", str(p.dir / "config.yaml"), before=before)
        .end()
        .checked(),
        "run.directory|directory",
    )


kind("umask")


@fault(ROOM, "umask 777: nothing that is made can be read")
def umask(p: Place) -> None:
    p.config()
    user = p.give_to(65534)
    failed(p.train(user=user, before=lambda: os.umask(0o777)))


@fault(ROOM, "umask 0: nothing that is made can be written by everybody")
def umask_none(p: Place) -> None:
    folder(p)
    p.config(data={"source": "text"})
    done(p.train(before=lambda: os.umask(0)))
    everybodys = [
        path for path in p.run.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o002
    ]
    if everybodys or p.run.stat().st_mode & 0o002:
        raise Silent(f"{len(everybodys)} of them can, such as {(everybodys or [p.run])[0].name}")


@fault(ROOM, "umask 077: a run can be read again by its own user")
def umask_own(p: Place) -> None:
    p.config()
    user = p.give_to(65534)
    done(p.train("train.steps=4", user=user, before=lambda: os.umask(0o077)))
    ended = p.train(user=user)
    done(ended)
    resumed(ended, 4)


kind("installation")


@fault(
    ROOM, "a module of the user's in the working directory is called like one of ours or Python's"
)
def shadows(p: Place) -> None:
    """`python -m` puts the working directory first; ours must not be taken for it."""
    p.base()
    for name in ("train", "data", "plan", "run", "files", "optim"):
        p.file(f"{name}.py", "raise RuntimeError('the wrong module')\n")
    ended = p.python(*TRAIN)
    done(ended)
    p.undisturbed()


@fault(ROOM, "the package is installed where it cannot be written")
def installed(p: Place) -> None:
    p.base()
    p.remount_read_only(REPOSITORY / "meshtrain")
    ended = p.python(*TRAIN, env={"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": None})
    done(ended)
    p.undisturbed()


kind("suspended")


@fault(ROOM, "another process traces, and time stands still for a minute: stopped and continued")
def suspended(p: Place) -> None:
    running = p.training()
    running.until(lambda: p.last_step() >= 2)
    import time

    for _ in range(3):
        if not running.alive():
            break
        with running.frozen():
            time.sleep(0.3)
    done(running.end().checked())
    p.undisturbed()
