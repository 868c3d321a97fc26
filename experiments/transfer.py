"""Whether a rate found on a small model holds on a large one: `optimizer.transfer` beside the same config without.

    python -m experiments.transfer coordinates [--svg FILE]     how far steps move logits and stream, by width and depth
    python -m experiments.transfer sweep [--wide N]             the best rate of a small sweep at width 64 and at N

A coordinate check (Yang et al. 2022, appendix D.1) takes a few steps at one rate. Where rates hold, what they move is
as large at every size. The sweep trains on the standard library's text from one seed, rates a factor of 4 apart.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
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
RATES = tuple(4.0**n for n in range(-6, -1))


def config_of(width: int, depth: int, rate: float, transfer: bool, **sections: Any) -> Config:
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
        jax.debug.callback(lambda value: streams.append(np.asarray(value)), y, ordered=False)
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
        cells = [f"{values[name]:.3g}" for name in usual for values in (usual, transferred)]
        report(size, *cells)
    return found


def drawn(found: dict[str, dict[bool, list[dict[str, float]]]]) -> str:
    """Returns a picture: how far logits move by width and by depth, over what they move at the smallest size."""
    body = []
    for column, (by, curves) in enumerate(found.items()):
        left = 40 + 260 * column
        body += [svg.small(left, 14, f"logits moved, by {by}, × the smallest")]
        body += [svg.small(left + 50 * n, 196, size) for n, (size, *_) in enumerate(sizes(by))]
        for power in range(-2, 5):
            y = 140 - 24 * power
            body.append(svg.small(left - 8, y + 4, f"{2.0**power:g}", "end"))
            body.append(f'<path d="M{left} {y}h170" stroke="{svg.GRID}"/>')
        for transfer, colour in ((False, svg.SECOND), (True, svg.FIRST)):
            values = np.array([values["logits"] for values in curves[transfer]])
            ys = 140 - 24 * np.clip(np.log2(values / values[0]), -2, 4)
            points = " ".join(f"{left + 8 + 50 * n},{y:.1f}" for n, y in enumerate(ys))
            body.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            words = "with transfer" if transfer else "without"
            body.append(
                f'<text x="{left + 90}" y="{34 + 16 * transfer}" fill="{colour}">{words}</text>'
            )
    return svg.svg(540, 204, body, "how far four steps move logits, by width and by depth")


def print_coordinates(picture: Path | None) -> None:
    """Prints two tables, and writes the picture."""
    found = {}
    for by in ("width", "depth"):
        heads = ("logits", "with transfer", "stream", "with transfer")
        table = Table(by.ljust(6), *heads, title=f"Moved by {STEPS} steps at {RATE:g}, by {by}")
        found[by] = coordinates(by, table.row)
    if picture is not None:
        picture.write_text(svg.file(drawn(found)))
        print(f"\n{picture}")


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


def print_sweep(wide: int, steps: int, rates: Sequence[float]) -> None:
    """Prints losses by rate, and how many steps of the grid the best one moves with the width."""
    columns = [(width, transfer) for transfer in (False, True) for width in (BASE["width"], wide)]
    heads = [f"{width}{', transfer' if transfer else ''}".ljust(13) for width, transfer in columns]
    table = Table("rate".ljust(10), *heads, title=f"Loss behind {steps} steps, by width")
    train = {"steps": steps, "global_batch_size": 8, "sequence_length": 64}
    losses = []
    for rate in rates:
        configs = [
            config_of(width, BASE["depth"], rate, transfer, train=train)
            for width, transfer in columns
        ]
        losses.append([last_loss(config) for config in configs])
        table.row(f"{rate:.2g}", *(f"{loss:.3f}" for loss in losses[-1]))
    best = np.argmin(np.array(losses), axis=0)
    for name, (narrow, broad) in (("without", best[:2]), ("with transfer", best[2:])):
        print(
            f"{name}: the best rate is {rates[narrow]:.2g} at width {BASE['width']} and {rates[broad]:.2g} at {wide}, "
            f"{abs(int(narrow) - int(broad))} steps of the grid apart"
        )


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("what", choices=("coordinates", "sweep"))
    parser.add_argument("--svg", type=Path, help="where the picture of coordinates is written")
    parser.add_argument("--wide", type=int, default=512, help="width of the large model of a sweep")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run of a sweep")
    options: argparse.Namespace = parser.parse_args()
    fake_devices(1)
    if options.what == "sweep":
        print_sweep(options.wide, options.steps, RATES)
    else:
        print_coordinates(options.svg)


if __name__ == "__main__":
    main()
