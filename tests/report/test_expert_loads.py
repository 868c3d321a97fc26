"""The load of experts by layer: what a run's rows tell of it where asked, and the picture of it in a report."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import axes, check_drawing
from refusals import tells

import meshtrain as mt
from meshtrain.parallel.loads import COUNTS, LayerLoads, of_layers
from meshtrain.report import experts
from meshtrain.report.experts import ExpertLoads
from meshtrain.report.facts import gather
from meshtrain.report.page import page
from meshtrain.report.summary import summarise
from meshtrain.report.text import render

# Of two layers with four experts: tokens, dropped rows or tokens' rounds, entropies summed over the tokens; two experts
# a token.
COUNTED = np.array([[4, 0, 2, 2, 1, 3.0], [8, 0, 0, 0, 0, 0.5]])
RUN = {
    "model": {
        "layers": 2,
        "d_model": 16,
        "heads": 2,
        "vocab_size": 260,
        "moe": {"experts": 4, "top_k": 2, "d_ff": 16},
    },
    "data": {"source": "synthetic"},
    "train": {"steps": 5, "global_batch_size": 8, "sequence_length": 16},
}


def config(every=2):
    return mt.load(RUN, [f"telemetry.experts_every={every}"])


def rows_of(directory):
    return [
        json.loads(line)
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_row_has_each_layers_numbers():
    counts = COUNTED.copy()
    counts[:, 4] = 4, 6  # of four tokens each
    row = of_layers(counts, config())
    assert row["expert_tokens"] == [[4, 0, 2, 2], [8, 0, 0, 0]]
    assert row["layer_expert_load"] == {"0": 2.0, "1": 4.0}
    assert (
        row["layer_expert_rounds"] == {"0": 1.0, "1": 1.5}
        and "layer_dropped_rows" not in row
    )
    assert row["layer_router_entropy"] == {"0": 0.75, "1": 0.125}


def test_a_row_has_each_layers_dropped_rows_where_a_capacity_drops():
    row = of_layers(COUNTED, mt.load(RUN, ["parallel.experts.capacity=1.25"]))
    assert (
        row["layer_dropped_rows"] == {"0": 1.0, "1": 0.0}
        and "layer_expert_rounds" not in row
    )


def test_rows_have_them_as_often_as_asked_and_at_the_end():
    hook, told = LayerLoads(config(every=3)), []
    for step in range(1, 6):
        metrics = {"loss": jnp.float32(1), COUNTS: jnp.asarray(COUNTED)}
        hook.after_step(step, None, metrics)
        assert metrics.keys() == {"loss"}, "all others are plain numbers"
        row = {"step": step}
        hook.after_metrics(row, due=step != 1)
        told += [step] if "expert_tokens" in row else []
    assert told == [2, 5]


@pytest.mark.thorough
@pytest.mark.parametrize("uneven_or_islands", ["uneven stages", "islands"])
def test_rows_of_a_run_count_every_token_of_every_layer(tmp_path, uneven_or_islands):
    more = {
        "uneven stages": {
            "mesh": {"data": 2, "expert": 2, "pipeline": 2},
            "parallel": {"microbatches": 2},
        },
        "islands": {
            "mesh": {"data": 4, "expert": 2, "islands": 2},
            "parallel": {"sync": {"every": 2, "start": 1}},
        },
    }
    five = ["telemetry.experts_every=2", "model.layers=5"]
    run = {**RUN, **more[uneven_or_islands], "run": {"directory": str(tmp_path)}}
    mt.train(mt.load(run, five))
    rows = rows_of(tmp_path)
    told = [row for row in rows if "expert_tokens" in row]
    assert [row["step"] for row in told] == [1, 3, 5]
    for row in told:
        tokens = np.array(row["expert_tokens"])
        assert row["grad_norm"] < 10, "counts are no gradient"
        assert tokens.shape == (5, 4) and (tokens.sum(1) == 8 * 16 * 2).all()
        assert np.isclose(
            np.mean(list(row["layer_router_entropy"].values())),
            row["router_entropy"],
            rtol=1e-5,
        )
        if uneven_or_islands == "uneven stages":
            assert max(row["layer_expert_load"].values()) == pytest.approx(
                row["expert_load"]
            )
    alone = tmp_path / "alone"
    # Layers are in their order, wherever they lie
    if uneven_or_islands == "uneven stages":
        mt.train(mt.load({**RUN, "run": {"directory": str(alone)}}, five))
        assert rows_of(alone)[0]["expert_tokens"] == rows[0]["expert_tokens"]


def written(directory, tokens):
    directory.mkdir()
    (directory / "config.yaml").write_text("model: {moe: {experts: 4}}\n")
    rows = [
        {"step": 1, "loss": 5.0, "expert_load": 2.0, "expert_tokens": [[1, 1]]},
        {"step": 2, "loss": 4.0, "expert_load": 4.0, "expert_tokens": tokens},
    ]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return gather(directory)


def test_a_report_has_a_map_of_the_newest_loads(tmp_path):
    facts = written(tmp_path / "run", [[4, 0, 2, 2], [8, 0, 0, 0]])
    summary = summarise(facts)
    html, text = page([facts], [summary]), render(facts, summary)
    most, least = (
        "at most 4.00 (layer 1, expert 0)",
        "at least 0.00 (layer 0, expert 1)",
    )
    assert tells(text, most, least, "25% of the experts")
    assert re.search(r"layer 1 +4\.00 ", text)
    (drawing,) = re.findall(r'<svg[^>]*"load of 4 [^"]* 2 layers.*?</svg>', html)
    check_drawing(drawing)
    assert axes(drawing) == ["layer", "expert"] and ">over 4<" in drawing
    assert "fullest expert over the mean" in html


@pytest.mark.parametrize(
    "tokens",
    [
        [[1, 2], [3]],
        [["a"]],
        [[10**400]],
        [[-1]],
        [[1e300]],
        [],
        [[]],
        {"0": [1]},
        [1],
        None,
    ],
)
def test_what_is_no_map_is_left_out(tmp_path, tokens):
    assert written(tmp_path / "run", tokens).loads.step == 1


@pytest.mark.parametrize("layers, most", [(48, 128), (61, 256)])
def test_a_map_of_many_experts_stays_small(layers, most):
    tokens = np.random.default_rng(0).lognormal(0, 0.5, (layers, most))
    drawing = experts.picture(ExpertLoads(1, tokens))
    check_drawing(drawing)
    assert len(drawing) < 24 * tokens.size


def test_every_expert_is_drawn_in_the_class_of_its_load():
    tokens = np.array([[0.4, 0.7, 1.0, 1.9, 3.9, 4.1, *[0] * 6]])
    picture = experts.picture(ExpertLoads(1, tokens))
    drawn = re.findall(
        r'<path d="([^"]*)" fill="([^"]*)" fill-opacity="([^"]*)"', picture
    )
    assert [(hue, float(strength)) for _, hue, strength in drawn] == [
        c[1:3] for c in experts.CLASSES
    ]
    assert [path.count("M") for path, *_ in drawn] == [6, 1, 1, 1, 1, 1, 1]
