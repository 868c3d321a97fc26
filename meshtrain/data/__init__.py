"""From text, or images, to the same global batches on any mesh.

Batch k of a run is a pure function of the seed and k. So the state of the data is one integer, and a run goes on with
any number of processes in the order that it would have had: each process computes which rows are its own.

    files ──documents──► units ──unit──► shards ──pieces──► windows, packing, grouping   rows of T labels
                                                               │ permutation, anew each epoch
    devices ◄──Loader, a thread ahead── rows of this process ◄─┴─ batches: rows of batch k

- `meshtrain.data.from_config`: `open_data`, from a config to the batches of a split (`meshtrain.data.batches`).
- `meshtrain.data.loader`: `Loader`, which reads and places batches on a thread.
- `meshtrain.data.images`: the same of images.
- `meshtrain.data.input_files`, `meshtrain.data.formats`, `meshtrain.data.documents`: what is read, as what, in what
  order.
- `meshtrain.data.prepare`, `meshtrain.data.unit`: text to shards, in parallel, interrupted and gone on with.
- `meshtrain.data.chat`, `meshtrain.data.template`, `meshtrain.data.examples`: conversations, what the tokenizer's
  template makes of them,
  and which tokens of it are learned.
- `meshtrain.data.shards`, `meshtrain.data.manifest`: what lies on disk. `meshtrain.data.cache`: prepared when first
  opened.
- `meshtrain.data.token_rows`, `meshtrain.data.packing`, `meshtrain.data.grouping`: the batchings.
  `meshtrain.data.mixture`: several sources.
- `meshtrain.data.permutation`: a shuffle without a table. `meshtrain.data.tokenizer`: bytes, or by `tokenizer_file` a
  tokenizer.json.

`python -m meshtrain.data` prepares text, trains a tokenizer and verifies shards.

Measured (`experiments/bench_data.py`): batches come at 0.48 to 1.30 of the rate at which a bare loop copies their
tokens and labels out of a memory map.
"""

from meshtrain.data.batches import SplitBatches, TextBatches, resolve_epochs
from meshtrain.data.from_config import open_data
from meshtrain.data.loader import Loader

__all__ = ["Loader", "SplitBatches", "TextBatches", "open_data", "resolve_epochs"]
