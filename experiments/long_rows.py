"""Whether a model uses what lies far back in long rows: its held-out loss by quarter of a row,
`python -m experiments.long_rows RUN`."""

import sys
from pathlib import Path

import jax
import numpy as np

import meshtrain as mt

PARTS = 4


def by_part(run: str, batches: int) -> np.ndarray:
    """Mean losses of the parts of held-out rows, in order, in nats a label that counts."""
    model = mt.read_model(run)
    _, held_out = mt.open_data(mt.load(Path(run) / "config.yaml"))
    assert held_out is not None
    losses, counts = [], []
    for k in range(batches):
        batch = held_out.batch(k)
        log_p = np.asarray(jax.nn.log_softmax(model(batch["tokens"])))
        losses.append(-np.take_along_axis(log_p, batch["labels"][..., None], axis=-1)[..., 0])
        counts.append(batch.get("weights", np.ones_like(losses[-1])))
    sums, weights = (
        np.concatenate(x).reshape(-1, PARTS, x[0].shape[1] // PARTS).sum((0, 2))
        for x in (np.multiply(losses, counts), counts)
    )
    return sums / weights


if __name__ == "__main__":
    print(" ".join(f"{loss:.4f}" for loss in by_part(sys.argv[1], 16)))
