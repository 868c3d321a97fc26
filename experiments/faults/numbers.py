"""Numbers: losses and weights that are not finite, loss scales, offloaded state; no second set of weights is saved as
sound.
"""

import math

from experiments.faults.harness import (
    Place,
    Silent,
    Unclear,
    done,
    failed,
    fault,
    kind,
    last_line,
    refused,
)

ROOM = "numbers"
HALF = ("precision.compute=float16",)


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
            leaves = StepManifest.read(directory).leaves
            targets = {
                n: jax.ShapeDtypeStruct(tuple(r["shape"]), r["dtype"], sharding=device)
                for n, r in leaves.items()
            }
            for name, array in arrays.read(directory / steps.ARRAYS, targets).items():
                if (
                    np.issubdtype(array.dtype, np.floating)
                    and not np.isfinite(np.asarray(array)).all()
                ):
                    print(f"{name} of step {step} is not finite")
                    return 3
        return 0

    ended = p.start("", call=look).end()
    if ended.code == 3:
        raise Silent(last_line(ended.out))
    ended.checked()


kind(
    "not-finite",
    "test_train.py::test_a_gradient_that_is_not_finite_stops_the_run_with_exit_code_1_and_says_at_which_step",
    "test_train.py::test_weights_that_an_update_made_useless_are_never_saved",
    "test_precision.py::test_one_number_makes_a_state_unsound",
)


@fault(ROOM, "an update that makes weights that are not finite is not saved, nor resumed from", "5")
def update(p: Place) -> None:
    settings = (
        "optimizer.learning_rate=1e38",
        "optimizer.warmup_steps=0",
        "optimizer.grad_clip=0",
        "checkpoint.every=1",
        "optimizer.name=sgd",
    )
    for _ in range(2):
        failed(
            p.train(*settings), codes=(1,), silent="exit code 0 with weights that are not finite"
        )
        sound(p)


@fault(ROOM, "a learning rate of 1e30, a checkpoint a step, twice", "5")
def rate(p: Place) -> None:
    settings = (
        "optimizer.learning_rate=1e30",
        "optimizer.warmup_steps=1",
        "checkpoint.every=1",
        "train.steps=12",
    )
    for _ in range(2):
        ended = p.train(*settings)
        if ended.code not in (0, 1):
            raise Unclear(f"exit code {ended.code}: {last_line(ended.err)}")
        sound(p)
        if ended.code == 0 and any(row["loss"] is None for row in p.rows()):
            raise Silent("exit code 0 with a loss that is not finite")


@fault(ROOM, "the last step's update makes weights that are not finite", "5")
def last_update(p: Place) -> None:
    done(p.train("train.steps=7", "optimizer.schedule=constant"))
    ended = p.train(
        "train.steps=8",
        "optimizer.schedule=constant",
        "optimizer.learning_rate=1e38",
        "optimizer.grad_clip=0",
    )
    if ended.code == 0:
        sound(p)
    sound(p)


kind(
    "loss-scale",
    "test_train.py::test_a_float16_run_that_only_skips_ends_with_exit_code_1",
    "test_precision.py::test_loss_scale_never_grows_beyond_the_largest",
    "test_precision.py::test_loss_scale_itself_overflows_float16_and_comes_down_to_what_fits",
    "test_config.py::test_bad_input_is_refused_in_one_sentence",
)


@fault(ROOM, "float16: a loss that is never finite does not end well", "5")
def never_finite(p: Place) -> None:
    ended = p.train(*HALF, "model.init_std=1e30", "checkpoint.every=4", "train.steps=60")
    failed(ended, codes=(1,), silent=f"exit code 0, untrained: {last_line(ended.out)}")


@fault(ROOM, "float16: the scale does not grow without bound", "5")
def grows(p: Place) -> None:
    ended = p.train(
        *HALF,
        "precision.loss_scale_window=1",
        "train.steps=200",
        "checkpoint.every=0",
        "log.every=1",
    )
    done(ended)
    scales = [row.get("loss_scale") for row in p.rows()]
    if any(scale is None or not math.isfinite(scale) for scale in scales):
        raise Silent(f"loss scales {scales[-5:]}")


@fault(ROOM, "float16: gradients that are all zero do not let the scale run away", "5")
def zero_gradients(p: Place) -> None:
    settings = (
        "precision.loss_scale_window=1",
        "train.steps=300",
        "checkpoint.every=0",
        "optimizer.learning_rate=1e-30",
    )
    ended = p.train(*HALF, *settings, "model.init_std=1e-30")
    done(ended)
    scales = [row.get("loss_scale") for row in p.rows()]
    if any(scale is None or not math.isfinite(scale) for scale in scales):
        raise Silent(f"loss scales {scales[-5:]}")


@fault(ROOM, "float16: a first scale of 1e40", "5")
def first_scale(p: Place) -> None:
    refused(p.train(*HALF, "precision.loss_scale=1e40"), "loss_scale")


@fault(ROOM, "float16: a first scale of 1e38 finds its way down")
def large_scale(p: Place) -> None:
    ended = p.train(*HALF, "precision.loss_scale=1e38", "train.steps=200", "checkpoint.every=0")
    if ended.code == 0 and not any(
        math.isfinite(row["loss"] or math.nan) and row["grad_norm"] for row in p.rows()[-5:]
    ):
        raise Silent("exit code 0, untrained")
    if ended.code:
        refused(ended, code=ended.code if ended.code in (1, 2) else 2)


def with_offload(name: str, *settings: str, point: str = "") -> None:
    @fault(ROOM, f"offloaded optimizer state: {name}", point)
    def _(p: Place) -> None:
        ended = p.train("parallel.offload_optimizer=true", *settings)
        if ended.code:
            refused(ended, code=ended.code if ended.code in (1, 2) else 2)
            return
        if p.last_step() != 8:
            raise Silent(f"{p.last_step()} steps")
        p.intact(8)
        sound(p)


kind("offload")
with_offload("float16", *HALF, point="8")
with_offload(
    "float16 on two devices, ZeRO-3", *HALF, "mesh.data=2", "parallel.zero_stage=3", point="8"
)
with_offload("float16 with a pipeline", *HALF, "mesh.pipeline=2", point="8")
with_offload("bfloat16", "precision.compute=bfloat16")
with_offload("float16, muon", *HALF, "optimizer.name=muon", point="8")
with_offload("float32", "optimizer.name=adafactor")


def extreme(name: str, *settings: str) -> None:
    """Ends well with finite numbers, or in one sentence; what is saved is sound."""

    @fault(ROOM, f"extremes: {name}")
    def _(p: Place) -> None:
        ended = p.train(*settings, "checkpoint.every=1")
        if ended.code == 0:
            if any(row["loss"] is None for row in p.rows()):
                raise Silent("exit code 0 with a loss that is not finite")
        else:
            failed(ended)
        sound(p)


kind("extreme-number")
extreme("initial weights of 1e20", "model.init_std=1e20")
extreme("initial weights of 1e-40", "model.init_std=1e-40")
extreme("norm_eps of 1e30", "model.norm_eps=1e30")
extreme("norm_eps of 1e-300", "model.norm_eps=1e-300", "model.init_std=1e-30")
extreme("rope_theta of 1e-30", "model.rope_theta=1e-30")
extreme("rope_theta of 1e300", "model.rope_theta=1e300")
extreme("weight decay of 1e30", "optimizer.weight_decay=1e30")
extreme("eps of 1e-300", "optimizer.eps=1e-300")
extreme("z_loss of 1e30", "train.z_loss=1e30")
extreme("grad_clip of 1e-300", "optimizer.grad_clip=1e-300")
extreme("learning rate of 1e-320, a subnormal", "optimizer.learning_rate=1e-320")
extreme(
    "eval of a model that is not finite",
    "optimizer.learning_rate=1e30",
    "eval.every=1",
    "eval.batches=1",
)
