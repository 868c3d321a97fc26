"""Whether a model uses what lies far back in long rows: its held-out loss by quarter of a row, `python -m experiments.long_rows RUN`."""

import sys
from pathlib import Path

import jax
import numpy as np

import meshtrain as mt

PARTS = 4


def by_part(run: str, batches: int) -> np.ndarray:
    """Mean losses of the parts of held-out rows, in order, in nats a token."""
    model = mt.read_model(run)
    _, held_out = mt.open_data(mt.load(Path(run) / "config.yaml"))
    assert held_out is not None
    losses = []
    for k in range(batches):
        batch = held_out.batch(k)
        log_p = np.asarray(jax.nn.log_softmax(model(batch["tokens"])))
        losses.append(-np.take_along_axis(log_p, batch["labels"][..., None], axis=-1)[..., 0])
    return np.concatenate(losses).mean(axis=0).reshape(PARTS, -1).mean(axis=1)


if __name__ == "__main__":
    print(" ".join(f"{loss:.4f}" for loss in by_part(sys.argv[1], 16)))
