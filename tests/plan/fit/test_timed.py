"""Seconds of a compiled program: what stands one after the other adds up, what travels under work is waited for only
for the rest.
"""

import pytest

from experiments.plan.timed import timed
from meshtrain.cluster import algorithms
from meshtrain.config import load
from meshtrain.hlo.module import Module
from meshtrain.plan import named
from meshtrain.plan.compute import product

PRODUCT = (
    "f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
)
SENT = 64 * 2**20  # bytes of the gathered array


def text(between: str, after: str = "", turns: int = 0) -> str:
    """A gather over two devices with `between` before it is waited for, `after` behind; the same in a loop of
    `turns`.
    """
    body = f"""
  %a = f32[512,512]{{1,0}} parameter(0)
  %b = f32[8192,1024]{{1,0}} parameter(1)
  %g = (f32[8192,1024]{{1,0}}, f32[16384,1024]{{1,0}}) all-gather-start(%b), replica_groups={{{{0,1}}}}, dimensions={{0}}
{between}
  %d = f32[16384,1024]{{1,0}} all-gather-done(%g)
{after}
  ROOT %r = f32[512,512]{{1,0}} copy(%a)
"""
    if not turns:
        return (
            "HloModule m\n\nENTRY %main (a: f32[512,512], b: f32[8192,1024]) -> f32[512,512] {"
            + body
            + "}\n"
        )
    return (
        "HloModule m\n\n%body (a: f32[512,512], b: f32[8192,1024]) -> f32[512,512] {"
        + body
        + "}\n\n"
        "%cond (a: f32[512,512]) -> pred[] {\n  ROOT %p = pred[] constant(true)\n}\n\n"
        "ENTRY %main (a: f32[512,512]) -> f32[512,512] {\n  %a = f32[512,512]{1,0} parameter(0)\n"
        "  ROOT %w = f32[512,512]{1,0} while(%a), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"'
        f'{turns}"}}}}\n}}\n'
    )


def spent(hlo: str, monkeypatch) -> tuple:
    config = load(
        {"model": {"layers": 2, "d_model": 64, "heads": 2}, "mesh": {"tensor": 2}}
    )
    cluster = named("h100", 2)
    monkeypatch.setattr(
        "experiments.plan.timed.axes_of", lambda op, mesh: (("tensor",), 2)
    )
    whole = algorithms.best(
        algorithms.ALL_GATHER, cluster.axis("tensor", config.mesh), SENT
    ).seconds
    one = product(cluster.accelerator, "float32", 512, 512, 512)
    return timed(Module(hlo), None, config, cluster), whole, one, cluster


def products(count: int) -> str:
    return "\n".join(f"  %p{i} = {PRODUCT}" for i in range(count))


def test_what_nothing_hides_is_waited_for(monkeypatch):
    found, whole, one, cluster = spent(text("", products(3)), monkeypatch)
    assert found.waits["tensor"] == pytest.approx(whole)
    assert found.products == pytest.approx(3 * one)
    copy = (
        2
        * 512
        * 512
        * 4
        / (cluster.accelerator.bandwidth * 1e9 * cluster.accelerator.efficiency.memory)
    )
    assert found.memory == pytest.approx(copy) and found.seconds == pytest.approx(
        whole + 3 * one + copy
    )


def test_products_between_start_and_done_hide_as_much_as_they_take(monkeypatch):
    found, whole, one, _ = spent(text(products(4)), monkeypatch)
    assert 4 * one < whole
    assert found.waits["tensor"] == pytest.approx(whole - 4 * one)
    many, *_ = spent(text(products(int(whole / one) + 1)), monkeypatch)
    assert not many.waits["tensor"]


def test_a_loop_counts_by_its_turns(monkeypatch):
    (once, *_), (often, *_) = (
        spent(text(products(4), turns=turns), monkeypatch) for turns in (0, 7)
    )
    assert often.seconds == pytest.approx(7 * once.seconds)
    assert often.products == pytest.approx(7 * once.products)
    assert often.waits["tensor"] == pytest.approx(7 * once.waits["tensor"])
