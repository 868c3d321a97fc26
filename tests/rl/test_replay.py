"""Where routing is replayed, each token is learned from with the experts that took it where it was drawn."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from answering_runs import EXPERTS, MODEL, answering
from covering import thorough_but

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.generate.forward import DecodingForward
from meshtrain.model import experts
from meshtrain.rl.gate import Disagreement

MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "2 x 2": {"mesh": {"data": 2, "tensor": 2}},
    "pipeline": {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"zero_stage": 3, "microbatches": 2},
    },
    "zero bubble": {
        "mesh": {"data": 2, "pipeline": 2},
        "parallel": {"schedule": "zb_h1", "microbatches": 4},
    },
    "context": {"mesh": {"data": 2, "context": 2}, "parallel": {"zero_stage": 3}},
    "experts": {"mesh": {"data": 4, "expert": 2}},
}
MOE = {**EXPERTS, "moe": {**EXPERTS["moe"], "top_k": 2}}


@pytest.fixture
def drawn_by_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has tokens take the experts with the lowest scores where they are drawn."""
    stream = DecodingForward._stream
    choose = experts._choose

    def worst(self: DecodingForward, *given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(
                experts, "_choose", lambda moe, scores, bias: choose(moe, -scores, bias)
            )
            return stream(self, *given)

    monkeypatch.setattr(DecodingForward, "_stream", worst)


def rows_of(directory: Path, layout: str, **rl: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    sections = {
        "model": {**MODEL, **MOE},
        "rl": {"gap_limit": 1e-3, **rl},
        **MESHES[layout],
    }
    mt.train(answering(directory, **sections), callbacks=[rows.append])
    return rows


@pytest.mark.usefixtures("drawn_by_the_worst")
@pytest.mark.parametrize(
    "layout", thorough_but(list(MESHES), lambda _: False, ["2 x 2"])
)
def test_what_is_learned_takes_the_experts_that_drew_on_every_mesh(
    layout: str, tmp_path: Path
) -> None:
    alone = rows_of(tmp_path / "one", "one", replay_routing=True)
    rows = rows_of(tmp_path / "mesh", layout, replay_routing=True)
    assert max(row["rl/gap_max"] for row in rows) <= 1e-5
    for row, right in zip(rows, alone, strict=True):
        for metric in ("loss", "grad_norm", "rl/reward"):
            assert row[metric] == pytest.approx(right[metric], abs=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("drawn_by_the_worst")
def test_without_it_such_a_run_ends(tmp_path: Path) -> None:
    with pytest.raises(Disagreement):
        rows_of(tmp_path, "one")


def test_the_gradient_of_a_given_choice_is_that_of_the_routers_own() -> None:
    moe = mt.load({"model": {**MODEL, **MOE}}).model.moe
    logits = jax.random.normal(jax.random.key(0), (6, moe.experts))
    bias = jax.numpy.zeros(moe.experts)
    own = experts.route(moe, logits, bias, None)
    weights = lambda chosen, logits: (
        experts.route(moe, logits, bias, None, chosen).weights
    )
    by_own, by_given = (
        jax.jacobian(partial(weights, chosen))(logits) for chosen in (None, own.chosen)
    )
    assert (by_own == by_given).all()
    assert by_own.any()


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rl\.replay_routing.*model\.moe\.experts"):
        answering(tmp_path, rl={"replay_routing": True})
