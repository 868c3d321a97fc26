"""Configs that can run and so must, and what is said of them."""

from experiments.faults.harness import Place, Silent, done, fault, kind, told_or_done

PRINT = ("train", "--config", "config.yaml", "--print-config")

kind("config-legal")


def legal(name: str, *settings: str) -> None:
    @fault(f"legal: {name}")
    def _(p: Place) -> None:
        done(p.train(*settings))
        if p.last_step() != 8:
            raise Silent(f"{p.last_step()} steps")


legal("v_1f1b with pipeline 1", "parallel.schedule=v_1f1b", "model.layers=1")
legal("the largest seed of 32 bits", "run.seed=4294967295")
legal("a value with Windows line ends and a byte order mark", "run.seed=1\r")
legal("warm-up longer than the run", "optimizer.warmup_steps=1000")
legal("the smallest learning rate", "optimizer.learning_rate=1e-37")
legal("more fake devices than are used", "run.fake_devices=3")
legal("log and checkpoints beyond the end", "log.every=100", "checkpoint.every=100")


@fault("a config file with a byte order mark and Windows line ends")
def windows(p: Place) -> None:
    p.config(text=b"\xef\xbb\xbfrun: {seed: 3}\r\ntrain: {steps: 4}\r\n")
    done(p.command(*PRINT), "seed: 3", "steps: 4")


@fault("the learning rate ends at its final ratio and begins above zero")
def rungs(p: Place) -> None:
    ratio = ("optimizer.learning_rate=0.01", "optimizer.final_ratio=0.1")
    done(p.train("optimizer.warmup_steps=4", *ratio))
    rates = [row["learning_rate"] for row in p.rows()]
    if (
        not rates[0] > 0
        or abs(rates[-1] - 0.001) > 1e-6
        or max(rates) > 0.01 * (1 + 1e-6)
    ):
        raise Silent(f"learning rates {rates}")


@fault("the note of idle stages counts the chunks of an interleaved schedule")
def idle(p: Place) -> None:
    stages = ("mesh.pipeline=4", "model.layers=8", "parallel.microbatches=2")

    def sentence(*settings: str) -> str:
        ended = p.train(*stages, "train.steps=1", "checkpoint.resume=never", *settings)
        done(ended)
        return next((line for line in ended.out.splitlines() if "idles" in line), "")

    plain = sentence("parallel.schedule=1f1b")
    chunked = sentence("parallel.schedule=interleaved", "parallel.virtual_stages=2")
    if "60%" in plain and "60%" in chunked:
        raise Silent(f"the same with two chunks: {chunked}")


@fault("--print-config prints a config that is read back as it is")
def round_trip(p: Place) -> None:
    p.config()
    first = p.command(*PRINT)
    p.config(text=first.out)
    second = p.command(*PRINT)
    done(second)
    if first.out != second.out:
        raise Silent("the config that is printed is not the one that is read")


@fault("a directory whose name YAML reads as a number, a date, a truth, a null")
def names(p: Place) -> None:
    for name in ("1e3", "2024-01-01", "yes", "0x10", "1_000"):
        p.config(text=f"run: {{directory: {name}}}\n")
        ended = p.command(*PRINT)
        if (
            told_or_done(ended, "run.directory")
            and name not in ended.out.splitlines()[1]
        ):
            raise Silent(f"{name} became {ended.out.splitlines()[1]}")
