"""Whether a rate found on a small model holds on a large one: `optimizer.transfer` beside the same config without.

    python -m experiments.transfer coordinates            how far steps move logits and stream, by width and depth
    python -m experiments.transfer sweep [--svg FILE]     the best rate at widths 64, 128 and 512

A coordinate check (Yang et al. 2022, appendix D.1) takes a few steps at one rate. Where rates hold, what they move is
as large at every size. The sweep trains on the standard library's text from one seed, rates a factor of 2 apart. At
width 64 both are one config, since a base of the model's own size changes nothing.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import bench
from experiments.bench import Table
from meshtrain.config import Config, load
from meshtrain.data import open_data
from meshtrain.draw import svg
from meshtrain.mesh import fake_devices
from meshtrain.model.decoder import Block
from meshtrain.step import Program

BASE = {"width": 64, "depth": 2}
WIDTHS = (64, 128, 256, 512)
DEPTHS = (2, 4, 8, 16)
HEAD = 16  # the width of a head, at every size
STEPS = 4
RATE = 4e-3
SWEEP_WIDTHS = (64, 128, 512)
RATES = tuple(2.0**n for n in range(-13, -6))


def config_of(
    width: int, depth: int, rate: float, transfer: bool, **sections: Any
) -> Config:
    """Returns the config of a size."""
    heads = width // HEAD
    values: dict[str, Any] = {
        "model": {
            "layers": depth,
            "d_model": width,
            "heads": heads,
            "kv_heads": heads,
            "d_ff": 4 * width,
            "vocab_size": 257,
        },
        "train": {"global_batch_size": 8, "sequence_length": 64},
        "optimizer": {
            "learning_rate": rate,
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            **({"transfer": BASE} if transfer else {}),
        },
    }
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    return load(values)


def moved(config: Config, steps: int = STEPS) -> dict[str, float]:
    """Returns how far so many steps on one random batch move logits and the stream behind each layer: roots of mean
    squares.
    """
    streams: list[np.ndarray] = []

    def noted(block: Any, x: Any, sequence: Any, collectives: Any, dropout: Any) -> Any:
        y = Block.__call__(block, x, sequence, collectives, dropout)
        jax.debug.callback(
            lambda value: streams.append(np.asarray(value)), y, ordered=False
        )
        return y

    program = Program(config)
    shape = (config.train.global_batch_size, config.train.sequence_length + 1)
    text = np.random.default_rng(0).integers(0, 257, shape, np.int32)
    batch = program.place({"tokens": text[:, :-1], "labels": text[:, 1:]})
    watched = Program(config, program.mesh, block=noted)
    state = program.init()
    seen = []
    for count in (0, steps):
        for _ in range(count):
            state, _ = program.train_step(state, batch)
        streams.clear()
        logits = np.asarray(watched.logits(state.params, batch["tokens"]))
        jax.effects_barrier()
        # The last layer's is the largest, whichever came last.
        seen.append((logits, max(streams, key=lambda x: float(np.square(x).mean()))))
    (logits, stream), (logits_after, stream_after) = seen
    return {
        "logits": float(np.sqrt(np.square(logits_after - logits).mean())),
        "stream": float(np.sqrt(np.square(stream_after - stream).mean())),
    }


def sizes(by: str) -> Iterator[tuple[int, int, int]]:
    """Yields size, width and depth of a coordinate check by width or by depth."""
    for size in WIDTHS if by == "width" else DEPTHS:
        yield size, *((size, BASE["depth"]) if by == "width" else (BASE["width"], size))


def coordinates(
    by: str, report: Callable[..., None] = lambda *_: None
) -> dict[bool, list[dict[str, float]]]:
    """Returns what steps move at each size, without `transfer` (False) and with it."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for size, width, depth in sizes(by):
        for transfer, of_sizes in found.items():
            of_sizes.append(moved(config_of(width, depth, RATE, transfer)))
        usual, transferred = (of_sizes[-1] for of_sizes in found.values())
        cells = [
            f"{values[name]:.3g}" for name in usual for values in (usual, transferred)
        ]
        report(size, *cells)
    return found


def print_coordinates() -> None:
    """Prints two tables."""
    for by in ("width", "depth"):
        heads = ("logits", "with transfer", "stream", "with transfer")
        title = f"Moved by {STEPS} steps at {RATE:g}, by {by}"
        coordinates(by, Table(by.ljust(6), *heads, title=title).row)


def last_loss(config: Config) -> float:
    """Returns the mean loss of the last tenth of a run's steps; infinity where it is not finite."""
    data, _ = open_data(config)
    program = Program(config)
    state = program.init()
    losses = []
    for step in range(config.train.steps):
        state, metrics = program.train_step(state, program.place(data.batch(step)))
        losses.append(float(metrics["loss"]))
    last = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    return last if np.isfinite(last) else np.inf


def print_sweep(steps: int, picture: Path | None) -> None:
    """Prints losses by rate, and how many steps of the grid the best one moves with the width; writes the picture."""
    columns = [
        (width, transfer) for transfer in (False, True) for width in SWEEP_WIDTHS
    ]
    small = columns.pop(columns.index((BASE["width"], False)))
    heads = [
        f"{width}{', transfer' if transfer else ''}".ljust(13)
        for width, transfer in columns
    ]
    table = Table(
        "rate".ljust(10), *heads, title=f"Loss behind {steps} steps, by width"
    )
    train = {"steps": steps, "global_batch_size": 8, "sequence_length": 64}
    losses: dict[tuple[int, bool], list[float]] = {column: [] for column in columns}
    for rate in RATES:
        for column, found in losses.items():
            found.append(
                last_loss(
                    config_of(column[0], BASE["depth"], rate, column[1], train=train)
                )
            )
        table.row(f"{rate:.2g}", *(f"{found[-1]:.3f}" for found in losses.values()))
    losses[small] = losses[BASE["width"], True]
    best = {column: int(np.argmin(found)) for column, found in losses.items()}
    for transfer, words in ((False, "without"), (True, "with transfer")):
        rates = ", ".join(
            f"{RATES[best[w, transfer]]:.2g} at width {w}" for w in SWEEP_WIDTHS
        )
        apart = best[SWEEP_WIDTHS[-1], transfer] - best[small]
        print(
            f"{words}: the best rate is {rates}; {abs(apart)} steps of the grid apart"
        )
    if picture is not None:
        picture.write_text(svg.file(drawn_sweep(losses)))
        print(f"\n{picture}")


def drawn_sweep(losses: dict[tuple[int, bool], list[float]]) -> str:
    """Returns a picture: losses by rate, a curve a width, without `transfer` and with it; the best rates are dots."""
    body = []
    lowest = min(map(min, losses.values()))
    for column, words in enumerate(("without", "with transfer")):
        left = 40 + 260 * column
        body.append(svg.small(left, 14, f"loss by learning rate, {words}"))
        body += [
            svg.small(left + 28 * n, 196, f"{rate:.2g}"[1:], "middle")
            for n, rate in enumerate(RATES)
            if n % 2 == 0
        ]
        for tenth in range(0, 16, 5):
            y = 176 - 9.6 * tenth
            body.append(svg.small(left - 8, y + 4, f"{lowest + tenth / 10:.1f}", "end"))
            body.append(f'<path d="M{left} {y}h200" stroke="{svg.GRID}"/>')
        for width, colour in zip(
            SWEEP_WIDTHS, (svg.PALE, svg.SECOND, svg.FIRST), strict=True
        ):
            values = np.array(losses[width, bool(column)])
            ys = 176 - 96 * np.minimum(values - lowest, 1.5)
            places = [f"{left + 28 * n},{y:.1f}" for n, y in enumerate(ys)]
            x, y = places[int(np.argmin(values))].split(",")
            body.append(
                f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>'
                f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'
            )
    entries = zip(
        (svg.PALE, svg.SECOND, svg.FIRST),
        map("width {}".format, SWEEP_WIDTHS),
        strict=True,
    )
    keys, end = svg.keys(entries, 40, 206)
    return svg.svg(540, end, body + keys, "loss by learning rate at three widths")


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("what", choices=("coordinates", "sweep"))
    parser.add_argument("--svg", type=Path, help="where the picture is written")
    parser.add_argument(
        "--steps", type=int, default=60, help="steps of each run of a sweep"
    )
    options: argparse.Namespace = parser.parse_args()
    fake_devices(1)
    if options.what == "sweep":
        print_sweep(options.steps, options.svg)
    else:
        print_coordinates()


if __name__ == "__main__":
    main()
