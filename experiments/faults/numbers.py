"""Numbers: another precision at a resume, an island of padding alone, and numbers beyond all sense."""

import numpy as np

from experiments.faults.harness import (
    STEPS,
    Place,
    Silent,
    done,
    failed,
    fault,
    kind,
    last_line,
    resumed,
    told_or_done,
)


def sound(p: Place) -> None:
    """No committed step holds a number that is not finite."""

    def look() -> int:
        import jax

        from meshtrain.checkpoint import arrays, steps
        from meshtrain.checkpoint.manifest import StepManifest

        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for step in steps.committed_in(p.checkpoints):
            directory = p.checkpoints / str(step)
            targets = {
                name: jax.ShapeDtypeStruct(
                    tuple(leaf["shape"]), leaf["dtype"], sharding=device
                )
                for name, leaf in StepManifest.read(directory).leaves.items()
            }
            for name, x in arrays.read(directory / steps.ARRAYS, targets).items():
                if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                    print(f"{name} of step {step} is not finite")
                    return 3
        return 0

    ended = p.start("", call=look).end().checked()
    if ended.code:
        raise Silent(last_line(ended.said))


kind("extreme-number")


def extreme(*settings: str) -> None:
    """Ends well with finite numbers, or in one sentence; what is saved is sound."""

    @fault(f"extremes: {', '.join(settings)}")
    def _(p: Place) -> None:
        ended = p.train(*settings, "checkpoint.every=1")
        if ended.code:
            failed(ended)
        elif any(row["loss"] is None for row in p.rows()):
            raise Silent("exit code 0 with a loss that is not finite")
        sound(p)


for settings in (
    "model.init_std=1e20",
    "model.init_std=1e-40",
    "model.norm_eps=1e30",
    "model.norm_eps=1e-300 model.init_std=1e-30",
    "model.rope_theta=1e-30",
    "model.rope_theta=1e300",
    "optimizer.weight_decay=1e30",
    "optimizer.eps=1e-300",
    "train.z_loss=1e30",
    "optimizer.grad_clip=1e-300",
    "optimizer.learning_rate=1e-320",
    "optimizer.learning_rate=1e30 eval.every=1 eval.batches=1",
):
    extreme(*settings.split())
kind("precision-changed")


def precision(old: str, new: str, *settings: str) -> None:
    @fault(f"{' '.join([old, 'goes on as', new, *settings])}")
    def _(p: Place) -> None:
        done(p.train(f"precision.compute={old}", "train.steps=4", *settings))
        ended = p.train(f"precision.compute={new}", *settings)
        done(ended, "precision.compute")
        resumed(ended, 4)
        steps = [row["step"] for row in p.rows() if row["loss"] is not None]
        if steps != list(range(1, STEPS + 1)):
            raise Silent("not each step once with a loss")


ZERO = ("mesh.data=2", "parallel.zero_stage=3")
precision("float32", "float16")
precision("float16", "float32")
precision("bfloat16", "float16", *ZERO)
precision("float16", "bfloat16", *ZERO)
kind("islands-padded")


@fault("an island that has padding alone: the loss is that of the batch")
def padded(p: Place) -> None:
    common = ("train.uneven_batch=pad", "train.steps=2")
    done(p.train(*common))
    expected = p.rows()[0]["loss"]
    islands = ("mesh.data=3", "mesh.islands=3", "parallel.sync.every=2")
    if told_or_done(p.train(*common, *islands, "checkpoint.resume=never"), "island"):
        found = p.rows()[0]["loss"]
        if abs(found - expected) > 1e-4 * expected:
            raise Silent(f"loss {found}, where the batch's is {expected}")
