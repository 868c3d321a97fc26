"""Host memory while weights are read onto a mesh: what a process needs over the weights themselves.

    python -m experiments.adopt.memory            a Llama of 268 M parameters, 1.07 GB in float32, on 1 and on 8 fake devices

The files are written by one process and read by another, so that nothing of the writing counts. `RssAnon` of
/proc/self/status is sampled
all the while: RSS would count the mapped files too, which the system takes back when it likes. The arrays of CPU
devices are host memory themselves, so that the result is taken off; what is left must be at most twice the largest
shard of one layer and 50 MB.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from experiments import bench
from experiments.bench import Table, in_process

SECTION = {
    "model_type": "llama", "num_hidden_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
    "vocab_size": 32000, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
ALLOWED = 50e6
MESHES = {1: {}, 8: {"data": 2, "tensor": 2, "pipeline": 2}}


def write(directory: Path, dtype: str) -> None:
    """Random weights, a file a layer."""
    import ml_dtypes
    from safetensors.numpy import save_file

    from meshtrain.config import load
    from meshtrain.hf.mapping import mappings
    from meshtrain.hf_families import model_section

    model = load({"model": model_section(SECTION, "x")}).model
    draw, index = np.random.default_rng(0), {}
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    for layer in (None, *range(model.layers)):
        file, held = f"model-{layer}.safetensors", {}
        for mapping in mappings(model).values():
            if mapping.weight.stacked == (layer is not None):
                for name in mapping.tensors(layer):
                    held[name] = draw.standard_normal(
                        mapping.shape(), np.float32
                    ).astype(kind)
        save_file(held, directory / file)
        index |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    (directory / "config.json").write_text(json.dumps(SECTION))


class Peak(threading.Thread):
    """The largest RssAnon, in bytes, from now until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found = self.first = anonymous()
        self._going = True

    def run(self) -> None:
        while self._going:
            self.found = max(self.found, anonymous())
            time.sleep(0.001)

    def stop(self) -> int:
        self._going = False
        self.join()
        return self.found - self.first


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(
            int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")
        )


def read(directory: Path, devices: int) -> dict[str, float]:
    """One loading, measured in this process."""
    import jax

    from meshtrain.checkpoint.arrays import freed_blocks_returned
    from meshtrain.config.follow import replaced
    from meshtrain.hf import loading
    from meshtrain.hf.hf_directory import config_of
    from meshtrain.mesh import part_bytes
    from meshtrain.step import Program

    config = replaced(
        config_of(directory),
        mesh=MESHES[devices],
        parallel={"zero_stage": 1, "microbatches": 2},
    )
    program = Program(config)
    layout = program.layout
    # of a stacked weight one layer
    shards = [
        part_bytes(master)
        // (master.sharding.shard_shape(master.shape)[0] if placed.stacked else 1)
        for placed, master in zip(
            layout.flat, jax.tree.leaves(layout.masters), strict=True
        )
    ]
    jax.block_until_ready(jax.numpy.zeros(1))
    peak, began = Peak(), time.perf_counter()
    peak.start()
    with freed_blocks_returned():
        params = jax.block_until_ready(loading.read(layout, directory))
    seconds, over = time.perf_counter() - began, peak.stop()
    result = sum(
        shard.data.nbytes
        for x in jax.tree.leaves(params)
        for shard in x.addressable_shards
    )
    of_layers = [
        s for s, placed in zip(shards, layout.flat, strict=True) if placed.stacked
    ]
    return {
        "result": result,
        "over": over - result,
        "layer": max(of_layers),
        "leaf": max(shards),
        "seconds": seconds,
    }


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--write", nargs=2, metavar=("DIR", "DTYPE"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--read", nargs=2, metavar=("DIR", "DEVICES"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.write:
        return write(Path(options.write[0]), options.write[1])
    if options.read:
        return print(json.dumps(read(Path(options.read[0]), int(options.read[1]))))
    table = Table(
        "files   ", "devices", "result MB", "over it MB", "allowed MB", "seconds"
    )
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as directory:
            in_process(
                "experiments.adopt.memory",
                "--write",
                directory,
                dtype,
                JAX_PLATFORMS="cpu",
            )
            for devices in MESHES:
                found = in_process(
                    "experiments.adopt.memory",
                    "--read",
                    directory,
                    devices,
                    JAX_PLATFORMS="cpu",
                )
                sizes = (found["result"], found["over"], 2 * found["layer"] + ALLOWED)
                table.row(
                    dtype,
                    devices,
                    *(f"{size / 1e6:.0f}" for size in sizes),
                    f"{found['seconds']:.1f}",
                )


if __name__ == "__main__":
    main()
