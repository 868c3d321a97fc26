"""Numbers: offloaded state, and numbers beyond all sense; nothing that is not finite is saved."""

from experiments.faults.harness import (
    Place,
    Silent,
    failed,
    fault,
    kind,
    last_line,
    told_or_done,
)

HALF = "precision.compute=float16"


def sound(p: Place) -> None:
    """No committed step holds a number that is not finite."""
    import numpy as np

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
            for name, array in arrays.read(directory / steps.ARRAYS, targets).items():
                x = np.asarray(array)
                if np.issubdtype(array.dtype, np.floating) and not np.isfinite(x).all():
                    print(f"{name} of step {step} is not finite")
                    return 3
        return 0

    ended = p.start("", call=look).end()
    if ended.code == 3:
        raise Silent(last_line(ended.out))
    ended.checked()


kind("offload")


def with_offload(name: str, *settings: str) -> None:
    @fault(f"offloaded optimizer state: {name}")
    def _(p: Place) -> None:
        if told_or_done(p.train("parallel.offload_optimizer=true", *settings)):
            if p.last_step() != 8:
                raise Silent(f"{p.last_step()} steps")
            p.intact(8)
            sound(p)


with_offload("float16", HALF)
with_offload(
    "float16 on two devices, ZeRO-3", HALF, "mesh.data=2", "parallel.zero_stage=3"
)
with_offload("float16 with a pipeline", HALF, "mesh.pipeline=2")
with_offload("bfloat16", "precision.compute=bfloat16")
with_offload("float16, muon", HALF, "optimizer.name=muon")
with_offload("float32", "optimizer.name=adafactor")

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


extreme("model.init_std=1e20")
extreme("model.init_std=1e-40")
extreme("model.norm_eps=1e30")
extreme("model.norm_eps=1e-300", "model.init_std=1e-30")
extreme("model.rope_theta=1e-30")
extreme("model.rope_theta=1e300")
extreme("optimizer.weight_decay=1e30")
extreme("optimizer.eps=1e-300")
extreme("train.z_loss=1e30")
extreme("optimizer.grad_clip=1e-300")
extreme("optimizer.learning_rate=1e-320")
extreme("optimizer.learning_rate=1e30", "eval.every=1", "eval.batches=1")
