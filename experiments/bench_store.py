"""How fast batches come from shards in a store, beside the same shards in a directory, in turns.

pip install 'moto[server]'      # by hand: a server of S3's protocol on this machine
python experiments/bench_store.py [--megabytes 200] [--seconds 4] [--rounds 3]

cold      the first pass, which fetches each block that it reads
warm      once all blocks are in the cache, still read as a partial shard, and as one that came whole
local     the same shards in a directory
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments import bench
from experiments.bench import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

LENGTH, ROWS = 1024, 32


def main() -> None:
    from store_server import BUCKET, store_server

    from meshtrain import stores
    from meshtrain.data.input_files import find
    from meshtrain.data.prepare import prepare
    from meshtrain.data.unit import PrepareOptions

    parser = bench.parser(__doc__)
    parser.add_argument(
        "--megabytes", type=int, default=200, help="of text (default: 200)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of a turn (default: 4)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each (default: 3)"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, store_server():
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        text = Path(scratch) / "text"
        text.mkdir()
        for number in range(chosen.megabytes):
            (text / f"{number}.txt").write_bytes(os.urandom(500_000).hex().encode())
        local = Path(scratch) / "shards"
        prepare(find([str(text)]).files, local, PrepareOptions(validation=0.0))
        address = f"s3://{BUCKET}/shards"
        for path in local.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                stores.upload(path, f"{address}/{path.relative_to(local)}")
        stored = opened(address)
        cold = rate(stored, chosen.seconds)
        while any(b"\0" in have.read_bytes() for have in stores.cache().glob("*.have")):
            rate(stored, chosen.seconds)
        sources = {"local": opened(str(local)), "store, partial": stored}
        sources["store, whole"] = opened(address)
        turns: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(chosen.rounds):
            for name, batches in sources.items():
                turns[name].append(rate(batches, chosen.seconds))
    best = max(turns["local"])
    made = Table(
        "shards",
        "Mtokens/s",
        "of local",
        title="batches of 32 x 1024, best of the turns",
    )
    made.row("store, cold", f"{cold / 1e6:.1f}", f"{cold / best:.2f}")
    for name, rates in turns.items():
        made.row(name, f"{max(rates) / 1e6:.1f}", f"{max(rates) / best:.2f}")


def opened(source: str) -> Any:
    from meshtrain.config import load
    from meshtrain.data import open_data

    sizes = {"sequence_length": LENGTH, "global_batch_size": ROWS}
    return open_data(
        load({"data": {"source": source, "verify": False}, "train": sizes})
    )[0]


def rate(batches: Any, seconds: float) -> float:
    """Returns labels a second, read one batch after the other."""
    began = time.perf_counter()
    k = 0
    while time.perf_counter() - began < seconds:
        batches.batch(k)
        k += 1
    return k * LENGTH * ROWS / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
