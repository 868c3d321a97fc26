"""Devices that compute or keep wrong bits, without a word: found by what is there more than once, and by a product that
is known.

    checksums   every part of a state that several devices hold must be the same bits on all of them; of three or more,
                the majority says who is wrong; of two it is known only that they differ. Checked before each save, so
                that what diverged is never saved
    product     512 x 512 small integers, whose product every float32 gives exactly; now and then, on every device of
                this process, under a supervisor

Meta counts six silent corruptions in 54 days on 16,384 GPUs ("The Llama 3 Herd of Models", 2024, section 3.3.4).
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.compat import vary, varying
from meshtrain.parallel.offload import HOST
from meshtrain.run.processes import SickDevice, gathered
from meshtrain.survive.heartbeat import Heartbeat

Tree = Any

# Of the product's matrices, and their numbers: sums stay below 2^24, and the numbers exact in TF32 too.
SIDE = 512
LARGEST = 8
# numbers of a piece of a checksum, and pieces of one array
PIECE = 65536
MOST_PIECES = 256
PRODUCT_EVERY = 60.0  # seconds


class Health:
    """Looks after the devices of a mesh; every process must call `check_copies` alike.

    `state`: its shapes, with shardings.
    """

    def __init__(self, mesh: Mesh, state: Tree, heartbeat: Heartbeat) -> None:
        self._mesh = mesh
        self._state = state
        self._heartbeat = heartbeat
        self._due = 0.0
        self._local = Mesh(np.array(mesh.local_devices), ("device",))

    # --- copies

    def check_copies(self, state: Tree) -> None:
        """SickDevice on all processes if devices hold other bits of the same part of a state."""
        if not self._copied:
            return
        leaves = jax.tree.leaves(state)
        sums = self._checksums([leaves[number] for number in self._copied])
        places = {
            device.id: place for place, device in enumerate(self._mesh.devices.flat)
        }
        own = {
            str(places[s.device.id]): np.asarray(s.data).reshape(-1).tolist()
            for s in sums.addressable_shards
        }
        of_place = {
            int(place): numbers
            for process in gathered(own)
            for place, numbers in process.items()
        }
        ranks = [device.process_index for device in self._mesh.devices.flat]
        groups, names = zip(*self._copied.values(), strict=True)
        if sentence := differing(groups, of_place, names, ranks):
            raise SickDevice(*sentence)

    @cached_property
    def _checksums(self) -> Callable[[list[jax.Array]], jax.Array]:
        """Maps the leaves of which there are copies to uint32 [devices, leaves], each row on its device."""

        def local(leaves: list[jax.Array]) -> jax.Array:
            return jnp.stack(
                [vary(checksum(x), self._mesh.axis_names) for x in leaves]
            )[None]

        leaves = jax.tree.leaves(self._state)
        specs = [leaves[number].sharding.spec for number in self._copied]
        out = PartitionSpec(self._mesh.axis_names)
        return jax.jit(
            jax.shard_map(local, mesh=self._mesh, in_specs=(specs,), out_specs=out)
        )

    @cached_property
    def _copied(self) -> dict[int, tuple[list[list[int]], str]]:
        """Returns leaves of which several devices have the same part, but for those in host memory, by number: those
        devices' places, and the name.
        """
        places = {
            device.id: place for place, device in enumerate(self._mesh.devices.flat)
        }
        copied = {}
        for number, (path, leaf) in enumerate(
            jax.tree_util.tree_leaves_with_path(self._state)
        ):
            same: dict[str, list[int]] = defaultdict(list)
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                same[str(index)].append(places[device.id])
            groups = [group for group in same.values() if len(group) > 1]
            if groups and leaf.sharding.memory_kind != HOST:
                copied[number] = (
                    groups,
                    jax.tree_util.keystr(path, simple=True, separator="."),
                )
        return copied

    # --- the product

    def check_product(self, ready: Tree) -> None:
        """Checks it where it is due: SickDevice if a device of this process multiplies wrongly.

        `ready`: what the devices are busy with.
        """
        if self._heartbeat.supervised is None or time.monotonic() < self._due:
            return
        factors, expected = self._known
        jax.block_until_ready(ready)
        began = time.perf_counter()
        parts = [
            np.asarray(shard.data)
            for shard in self._multiply(*factors).addressable_shards
        ]
        seconds = time.perf_counter() - began
        apart = (part[0].view(np.uint32) ^ expected.view(np.uint32) for part in parts)
        wrong = sum(int(np.bitwise_count(bits).sum()) for bits in apart)
        self._heartbeat.matmul = {"seconds": round(seconds, 6), "bits": wrong}
        self._due = time.monotonic() + PRODUCT_EVERY
        if wrong:
            rank = jax.process_index()
            bits = f"{wrong} bits of a known product are not as they must be"
            raise SickDevice(
                f"a device of rank {rank} multiplies wrongly: {bits}.", [rank]
            )

    @cached_property
    def _known(self) -> tuple[tuple[jax.Array, jax.Array], np.ndarray]:
        """Returns the same two matrices on every device of this process, and numpy's product of them."""
        draw = np.random.default_rng(0).integers(-LARGEST, LARGEST, (2, SIDE, SIDE))
        sharding = NamedSharding(self._local, PartitionSpec("device"))
        copies = [
            np.broadcast_to(x.astype(np.float32), (self._local.size, SIDE, SIDE))
            for x in draw
        ]
        a, b = (jax.device_put(x, sharding) for x in copies)
        return (a, b), (draw[0].astype(np.float64) @ draw[1]).astype(np.float32)

    @cached_property
    def _multiply(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Multiplies [devices, n, n] by [devices, n, n], each device by itself."""
        multiply = jax.jit(jnp.matmul).lower(*self._known[0]).compile()
        jax.block_until_ready(multiply(*self._known[0]))  # the first call is slower
        return multiply


def checksum(x: jax.Array) -> jax.Array:
    """Returns the sum of an array's numbers as bits, modulo 2^32: a bit that flips changes it.

    A piece at a time: in one go a CPU would first write all bits to memory of their own, at a tenth of the speed.
    """
    flat, as_bits = x.reshape(-1), jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    n = min(flat.size, max(PIECE, -(-flat.size // MOST_PIECES)))

    def bits(start: jax.Array | int, size: int) -> jax.Array:
        return lax.bitcast_convert_type(
            lax.dynamic_slice(flat, (start,), (size,)), as_bits
        ).astype(jnp.uint32)

    if n == flat.size:  # a loop takes longer to compile
        return jnp.sum(bits(0, n), dtype=jnp.uint32)
    pieces, rest = divmod(flat.size, n)
    zeros = vary(jnp.zeros(n, jnp.uint32), varying(x))
    total = jnp.sum(
        lax.fori_loop(0, pieces, lambda i, sums: sums + bits(i * n, n), zeros),
        dtype=jnp.uint32,
    )
    return total + jnp.sum(bits(pieces * n, rest), dtype=jnp.uint32)


Groups = Sequence[Sequence[int]]


def differing(
    groups: Sequence[Groups],
    sums: Mapping[int, Sequence[int]],
    names: Sequence[str],
    ranks: Sequence[int],
) -> tuple[str, list[int] | None] | None:
    """Returns a sentence on copies that differ, and the ranks that are to blame, if that is known; None if all are the
    same.

    groups: for each parameter, the places that have the same part of it; sums: of a place, its checksum of each
    parameter;
    ranks: of each place. Where most copies agree the others are to blame, and else the rank that has all of them.
    """
    blamed: dict[int, str] = {}
    unclear: dict[int, str] = {}
    for number, name in enumerate(names):
        for group in groups[number]:
            (common, count), *others = Counter(
                sums[place][number] for place in group
            ).most_common()
            if not others:
                continue
            decided = 2 * count > len(group)
            apart = {
                ranks[place]
                for place in group
                if not decided or sums[place][number] != common
            }
            clear = decided or len(apart) == 1
            for rank in apart:
                (blamed if clear else unclear).setdefault(rank, name)
    if blamed:
        rank, name = min(blamed.items())
        who = (
            f"rank {rank} holds"
            if len(blamed) == 1
            else f"ranks {', '.join(map(str, sorted(blamed)))} hold"
        )
        sentence = f"{who} other bits of {name} than the devices that must have the same; nothing of it is saved."
        return sentence, sorted(blamed)
    if unclear:
        who = " and ".join(map(str, sorted(unclear)))
        name = unclear[min(unclear)]
        return (
            f"ranks {who} hold different bits of {name}, which must be the same; whose are wrong is not known.",
            None,
        )
    return None
