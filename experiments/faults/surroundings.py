"""What surrounds a process: its environment, its clock, its streams, its working directory, its warnings."""

import glob
import os
import shutil
import time
from collections.abc import Callable

from experiments.faults.harness import (
    NOBODY,
    REPOSITORY,
    Ended,
    NotTried,
    Place,
    Silent,
    Unclear,
    done,
    failed,
    fault,
    goes_on,
    kind,
    refused,
    resumed,
    went_on,
)

TRAIN = ("-m", "meshtrain.train", "--config", "config.yaml")
TIDY = ("checkpoint.keep=2", "checkpoint.keep_best=0")

kind("environment")


def with_flags(env: dict[str, str | None]) -> dict[str, str | None]:
    """Beside the flags that there are: without those it would compile another program, with other roundings."""
    if "XLA_FLAGS" not in env:
        return env
    return {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {env['XLA_FLAGS']}"}


def early(env: dict[str, str | None], *words: str) -> None:
    """What Python or JAX reads when it is imported, so that it needs a new process; with words it is refused."""

    @fault(f"a new process with {env}")
    def _(p: Place) -> None:
        p.base()
        ended = p.python(*TRAIN, env=with_flags(env))
        if words:
            refused(ended, *words)
        else:
            went_on(p, ended)


def late(env: dict[str, str | None], base: str = "synthetic") -> None:
    def before() -> None:
        for name, value in with_flags(env).items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    goes_on(f"a process with {env}", base=base, before=before)


for env in (
    {"PYTHONDEVMODE": "1"},
    {"PYTHONOPTIMIZE": "2"},
    {"PYTHONHASHSEED": "0"},
    {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"LANG": "xx_YY.UTF-16", "LC_ALL": "xx_YY"},
    {"JAX_DEBUG_NANS": "1"},
    {"JAX_TRACEBACK_FILTERING": "off"},
    {"JAX_COMPILATION_CACHE_DIR": "/proc/nowhere"},
):
    early(env)
for env in (
    {"TERM": "dumb", "COLUMNS": "1"},
    {"COLUMNS": "wide"},
    {"HOME": None},
    {"HOME": "/nonexistent"},
    {"XDG_CACHE_HOME": ""},
    {"TMPDIR": "/nonexistent"},
    {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
    {"PJRT_NPROC": "many"},
    {"OMP_NUM_THREADS": "1"},
    {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"},
):
    late(env)
late({"XDG_CACHE_HOME": "cache"}, base="text")
early({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT")
early({"JAX_ENABLE_X64": "1"}, "JAX_ENABLE_X64")
early({"JAX_PLATFORMS": "cuda"}, "cuda|JAX_PLATFORMS")
early({"JAX_PLATFORMS": "toaster"}, "toaster|JAX_PLATFORMS")
early({"XLA_FLAGS": "--xla_force_host_platform_device_count=0"}, "no devices")
early({"XLA_FLAGS": "--xla_no_such_flag=1"}, "XLA_FLAGS")
early({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS")

kind("compilation-cache")


@fault("a damaged compilation cache")
def compiled(p: Place) -> None:
    p.base()
    cache = p.dir / "compiled"
    shutil.copytree(os.environ["JAX_COMPILATION_CACHE_DIR"], cache)
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    went_on(p, p.python(*TRAIN, env={"JAX_COMPILATION_CACHE_DIR": str(cache)}))


# --- the clock
kind("clock")


def clock(name: str, when: str) -> None:
    @fault(f"the clock {name}")
    def _(p: Place) -> None:
        found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
        if not found:
            raise NotTried(
                "libfaketime is not installed (Debian: apt install faketime)"
            )
        p.base()
        sets = (word for setting in TIDY for word in ("--set", setting))
        env = {"LD_PRELOAD": found[0], "FAKETIME": when, "DONT_FAKE_MONOTONIC": "1"}
        went_on(p, p.python(*TRAIN, *sets, env=env))
        p.intact(6)
        done(p.command("checkpoint", "ls", "run"))


clock("set back by ten years", "-3650d")
clock("set back to 1970", "@1970-01-01 00:00:00")
clock("ahead by a hundred years", "+36500d")


@fault("the clock is set back while training")
def back_while_running(p: Place) -> None:
    def before() -> None:
        real, began = time.time, time.monotonic()
        time.time = lambda: real() - (86_400 if time.monotonic() - began > 0.5 else 0)

    p.base()
    went_on(p, p.train(before=before))
    if any(row["step_seconds"] < 0 or row["tokens_per_second"] < 0 for row in p.rows()):
        raise Silent("a step took less than no time")


@fault("text with dates of 1970, of the future and below zero")
def dates(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    for k, path in enumerate(sorted((p.dir / "text").iterdir())):
        os.utime(path, ns=((0, 2**62, -(10**18))[k % 3],) * 2)
    went_on(p, p.train(), "text")


# --- streams and directories
kind("streams")


def streams(name: str, shell: str) -> None:
    @fault(f"{name} is closed")
    def _(p: Place) -> None:
        p.base()
        done(p.python(*TRAIN, shell=shell))
        p.undisturbed()


streams("stdin", "<&-")
streams("stderr", "2>&-")
streams("every stream", "<&- >&- 2>&-")


@fault("stderr is closed, and the config is wrong: the exit code says so")
def stderr_code(p: Place) -> None:
    p.config()
    ended = p.python(*TRAIN, "--set", "mesh.data=x", shell="2>&-")
    if ended.code != 2:
        raise Unclear(f"exit code {ended.code}")


kind("working-directory")


def no_directory(p: Place, *settings: str) -> Ended:
    """A run whose working directory is deleted before its start."""
    (p.dir / "here").mkdir()

    def before() -> None:
        os.chdir("here")
        os.rmdir("../here")

    return p.train(*settings, config=p.dir / "config.yaml", before=before)


@fault("the working directory is deleted before the start")
def deleted(p: Place) -> None:
    p.base()
    went_on(p, no_directory(p, f"run.directory={p.run}"))


@fault("the working directory is deleted, and run.directory is relative")
def deleted_relative(p: Place) -> None:
    p.config()
    refused(no_directory(p), "directory", code=1)


kind("umask")


def masked(bits: int) -> Callable[[], object]:
    return lambda: os.umask(bits)


@fault("umask 777: nothing that is made can be read")
def umask(p: Place) -> None:
    p.config()
    failed(p.train(user=p.give_to(NOBODY), before=masked(0o777)))


@fault("umask 077: a run can be read again by its own user")
def umask_own(p: Place) -> None:
    p.config()
    user = p.give_to(NOBODY)
    done(p.train("train.steps=4", user=user, before=masked(0o077)))
    ended = p.train(user=user)
    done(ended)
    resumed(ended, 4)


kind("installation")


@fault("a module in the working directory is called like one of ours or Python's")
def shadows(p: Place) -> None:
    """`python -m` puts the working directory first; ours must not be taken for it."""
    p.base()
    for name in ("train", "data", "plan", "run", "files", "optim"):
        p.file(f"{name}.py", "raise RuntimeError('the wrong module')\n")
    went_on(p, p.python(*TRAIN))


@fault("the package is installed where it cannot be written")
def installed(p: Place) -> None:
    p.base()
    p.remount_read_only(REPOSITORY / "meshtrain")
    env = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": None}
    went_on(p, p.python(*TRAIN, env=env))
