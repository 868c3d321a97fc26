"""A schedule from outside the package: registered with one call, then legal, trained, planned, drawn and searched by
its name.
"""

import dataclasses

import jax
import numpy as np
import pytest
from short_runs import canonical_numbers, place, token_batches

from meshtrain.config import ConfigError, MeshConfig, load
from meshtrain.mesh import make_mesh
from meshtrain.plan import named, plan
from meshtrain.plan.choices import schedules
from meshtrain.plan.search import candidates
from meshtrain.schedule.draw import gantt_text
from meshtrain.schedule.facts import facts_of
from meshtrain.schedule.generators import SCHEDULES, Schedule, make_table
from meshtrain.step import Program


def lazy(p: int, m: int, v: int) -> tuple[np.ndarray, np.ndarray]:
    """1F1B, each backward three clocks later than it could be."""
    s, j = np.arange(p)[:, None], np.arange(m)[None, :]
    return j + s, j + 2 * (p - 1) - s + 3


@pytest.fixture
def registered():
    yield SCHEDULES.register(Schedule("lazy", lazy))
    del SCHEDULES._entries["lazy"]


def configuration(schedule: str):
    return load(
        {
            "model": {
                "layers": 4,
                "d_model": 16,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 24,
                "vocab_size": 40,
            },
            "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
            "parallel": {"schedule": schedule, "microbatches": 4},
            "train": {"global_batch_size": 8, "sequence_length": 8},
        }
    )


def test_without_its_entry_it_is_refused():
    with pytest.raises(
        ConfigError, match=r"parallel\.schedule is 'lazy'; .* one of auto, gpipe, 1f1b"
    ):
        load(None, ["parallel.schedule=lazy"])


def test_one_that_cannot_run_is_refused():
    SCHEDULES.register(
        Schedule("hasty", lambda p, m, v: (lazy(p, m, v)[0], lazy(p, m, v)[1] - 4))
    )
    try:
        with pytest.raises(
            ConfigError,
            match=r"parallel\.schedule .*: schedule hasty: clock .* B0 is too early",
        ):
            plan(configuration("hasty"), named("h100", 8))
    finally:
        del SCHEDULES._entries["hasty"]


def test_clocks_of_another_shape_are_refused():
    with pytest.raises(
        ValueError, match=r"clocks of F, of B and perhaps of W, each \(2, 4\)"
    ):
        Schedule(
            "short", lambda p, m, v: (lazy(p, m, v)[0], lazy(p, m - 1, v)[1])
        ).table(2, 4, 1)


@pytest.mark.thorough
def test_it_trains_like_another(registered):
    losses = {}
    for schedule in ("1f1b", "lazy"):
        config = configuration(schedule)
        program = Program(config, make_mesh(config))
        tokens, labels = token_batches(config, 1)[0]
        batch = jax.device_put(
            {"tokens": tokens, "labels": labels}, program.batch_sharding
        )
        live = place(program.layout, canonical_numbers(program.layout))
        loss, gradient = jax.jit(program.gradients)(
            live, batch, np.int32(0), np.float32(1)
        )
        losses[schedule] = [
            np.asarray(leaf) for leaf in (loss, *jax.tree.leaves(gradient))
        ]
        assert (
            program.layout.table is not None and program.layout.table.name == schedule
        )
    for lazy_leaf, leaf in zip(losses["lazy"], losses["1f1b"], strict=True):
        np.testing.assert_allclose(lazy_leaf, leaf, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_it_is_planned_drawn_and_searched(registered):
    config, cluster = configuration("lazy"), named("h100", 8)
    planned, eager = plan(config, cluster), plan(configuration("1f1b"), cluster)
    assert (
        planned.clocks == eager.clocks + 3
        and planned.depths.stash == 4 > eager.depths.stash
    )
    assert planned.seconds > eager.seconds
    assert planned.timeline is not None and gantt_text(planned.timeline)
    assert ("lazy", 1) in schedules(4, MeshConfig(pipeline=2))
    mine = [
        c for c in candidates(config, cluster, 8) if c.base.parallel.schedule == "lazy"
    ]
    assert mine and all(np.isfinite(c.seconds) for c in mine)


def test_formulas_only_make_it_faster(registered):
    plain = dataclasses.replace(SCHEDULES["1f1b"], name="plain", formulas=None)
    SCHEDULES.register(plain)
    try:
        assert facts_of("plain", 4, 8) == facts_of("1f1b", 4, 8)
        assert (make_table("plain", 4, 8).cells == make_table("1f1b", 4, 8).cells).all()
    finally:
        del SCHEDULES._entries["plain"]
