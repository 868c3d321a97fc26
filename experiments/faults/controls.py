"""The judges judged: a healthy run is fine, and a run that is corrupted on purpose without a word is found out."""

import json
import os
import shutil
import signal
from collections.abc import Callable

from experiments.faults.harness import (
    LAST,
    Crash,
    Ended,
    Place,
    Silent,
    Unclear,
    Verdict,
    done,
    failed,
    fault,
    flip,
    goes_on,
    kind,
    refused,
    resumed,
)


def found_out(
    kind: type[Verdict], judge: Callable[..., object], *given: object
) -> None:
    """The judge must say so."""
    try:
        judge(*given)
    except kind:
        return
    except Verdict as other:
        raise Silent(f"the judge says {other.name}, not {kind.name}") from None
    raise Silent("the judge finds nothing")


kind("control")


@fault("nothing at all: a run from start to end")
def healthy(p: Place) -> None:
    done(p.train(), quiet=True)
    p.undisturbed()
    p.intact(2, 4, 6, 8)


goes_on("nothing but a kill: an interrupted run goes on", quiet=True)


@fault("a run that goes on with a patched state: every parameter a hundredth larger")
def silently_other(p: Place) -> None:
    """No program can know, but the judge of losses must."""

    def before() -> None:
        import jax

        from meshtrain.checkpoint.global_arrays import GlobalArrays

        real = GlobalArrays.state

        def other(self, *arguments):
            state = real(self, *arguments)
            params = jax.tree.map(lambda x: x * 1.01, state.params)
            return state._replace(params=params)

        GlobalArrays.state = other

    p.base()
    done(p.train(before=before))
    found_out(Silent, p.undisturbed)


@fault("metrics that lost a row, have one twice, or another loss")
def other_rows(p: Place) -> None:
    p.base(interrupted=False)
    whole = p.metrics.read_bytes().splitlines(keepends=True)
    p.undisturbed()
    row = json.loads(whole[2])
    other = json.dumps(row | {"loss": row["loss"] + 1e-7}).encode() + b"\n"
    for lines in (
        whole[:3] + whole[4:],
        whole + whole[-1:],
        whole[:-1],
        [*whole[:2], other, *whole[3:]],
    ):
        p.metrics.write_bytes(b"".join(lines))
        found_out(Silent, p.undisturbed)


@fault("a file that is lost, a checkpoint that is damaged")
def lost(p: Place) -> None:
    p.base()
    before = p.digests(p.run)
    p.survive(before)
    os.rename(p.checkpoints / "2", p.dir / "elsewhere")
    p.survive(before)
    shutil.rmtree(p.dir / "elsewhere")
    found_out(Silent, p.survive, before)
    flip(p.checkpoints / "4" / "manifest.json")
    found_out(Silent, p.intact, 4)
    p.intact(6)


@fault("a run that begins anew where it should go on")
def anew(p: Place) -> None:
    found_out(Silent, resumed, p.train(), LAST)


@fault(
    "a traceback, a signal, an endless process, a patched main that swallows an error"
)
def deaths(p: Place) -> None:
    def fails() -> int:
        raise RuntimeError("no")

    def dies() -> int:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0

    def hangs() -> int:
        signal.pause()
        return 0

    for call, patience in ((fails, 10.0), (dies, 10.0), (hangs, 0.5)):
        found_out(Crash, p.start("", call=call).end(patience).checked)
    found_out(Silent, refused, p.start("", call=lambda: 0).end())


@fault(
    "sentences: two, none, without a prefix, with another exit code, without the word"
)
def sentences(p: Place) -> None:
    refused(Ended(2, "", "meshtrain: mesh.data is 3.\n"), "mesh.data")
    for code, err in (
        (1, "meshtrain: x\n"),
        (2, ""),
        (2, "meshtrain: x\nmeshtrain: y\n"),
        (2, "x\n"),
        (2, "meshtrain: y\n"),
    ):
        found_out(Unclear, refused, Ended(code, "", err), "x")
    found_out(Silent, done, Ended(0, "fine\n", ""), "set aside")
    failed(Ended(1, "", "meshtrain: x\n"), "x", codes=(1,))
    found_out(Silent, failed, Ended(0, "", "meshtrain: x\n"))
    found_out(Unclear, failed, Ended(1, "", "x\n"))
