"""Devices that compute or keep wrong bits, without a word: found by what is there more than once, and by a product that is known.

    checksums   every part of a parameter that several devices hold must be the same bits on all of them; of three or more the majority
                says who is wrong, of two it is known only that they differ
    product     512 x 512 small integers, whose product every float32 gives exactly; now and then, on every device of this process

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
from meshtrain.run.failures import SickDevice
from meshtrain.run.processes import gathered
from meshtrain.survive.beat import Beat

Tree = Any

# Of the product's matrices, and their numbers: sums stay below 2^24, and the numbers exact in TF32 too.
SIDE, LARGEST = 512, 8
PIECE, MOST_PIECES = 65536, 256  # numbers of a piece of a checksum, and pieces of one array
PRODUCT_EVERY = 60.0  # seconds


class Health:
    """Looks after the devices of a mesh, if there is a supervisor to tell; every process must call `check_copies` alike."""

    def __init__(self, mesh: Mesh, params: Tree, beat: Beat) -> None:
        self._mesh, self._params, self._beat = mesh, params, beat
        self._due = 0.0
        self._local = Mesh(np.array(mesh.local_devices), ("device",))

    # --- copies

    def check_copies(self, params: Tree) -> None:
        """SickDevice on all processes if devices hold other bits of the same part of a parameter."""
        if self._beat.supervised is None:
            return
        sums = self._checksums(params)
        places = {device.id: place for place, device in enumerate(self._mesh.devices.flat)}
        own = {str(places[s.device.id]): np.asarray(s.data).reshape(-1).tolist() for s in sums.addressable_shards}
        of_place = {int(place): held for found in gathered(own) for place, held in found.items()}
        ranks = [device.process_index for device in self._mesh.devices.flat]
        if sentence := differing(self._groups, of_place, self._names, ranks):
            raise SickDevice(*sentence)

    @cached_property
    def _checksums(self) -> Callable[[Tree], jax.Array]:
        """params -> uint32 [devices, parameters], each row on its device."""

        copied = [number for number, groups in enumerate(self._groups) if groups]

        def local(params: Tree) -> jax.Array:
            leaves = jax.tree.leaves(params)
            sums = [checksum(x) if i in copied else jnp.uint32(0) for i, x in enumerate(leaves)]
            return jnp.stack([vary(x, self._mesh.axis_names) for x in sums])[None]

        specs = jax.tree.map(lambda x: x.sharding.spec, self._params)
        return jax.jit(
            jax.shard_map(local, mesh=self._mesh, in_specs=(specs,), out_specs=PartitionSpec(self._mesh.axis_names))
        )

    @cached_property
    def _groups(self) -> list[list[list[int]]]:
        """For each parameter, the places of the devices that hold the same part, where there are several."""
        places = {device.id: place for place, device in enumerate(self._mesh.devices.flat)}
        found = []
        for leaf in jax.tree.leaves(self._params):
            same: dict[str, list[int]] = defaultdict(list)
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                same[str(index)].append(places[device.id])
            found.append([group for group in same.values() if len(group) > 1])
        return found

    @cached_property
    def _names(self) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(self._params)]

    # --- the product

    def check_product(self, ready: Tree) -> None:
        """Where it is due: SickDevice if a device of this process multiplies wrongly. `ready`: what the devices are busy with."""
        if self._beat.supervised is None or time.monotonic() < self._due:
            return
        factors, expected = self._known
        jax.block_until_ready(ready)
        began = time.perf_counter()
        found = self._multiply(*factors)
        parts = [np.asarray(shard.data) for shard in found.addressable_shards]
        seconds = time.perf_counter() - began
        wrong = sum(bits_apart(part[0], expected) for part in parts)
        self._beat.matmul = {"seconds": round(seconds, 6), "bits": wrong}
        self._due = time.monotonic() + PRODUCT_EVERY
        if wrong:
            rank = jax.process_index()
            raise SickDevice(
                f"a device of rank {rank} multiplies wrongly: {wrong} bits of a known product are not as they must be.",
                [rank],
            )

    @cached_property
    def _known(self) -> tuple[tuple[jax.Array, jax.Array], np.ndarray]:
        """The same two matrices on every device of this process, and numpy's product of them."""
        draw = np.random.default_rng(0).integers(-LARGEST, LARGEST, (2, SIDE, SIDE))
        sharding = NamedSharding(self._local, PartitionSpec("device"))
        copies = [np.broadcast_to(x.astype(np.float32), (self._local.size, SIDE, SIDE)) for x in draw]
        a, b = (jax.device_put(x, sharding) for x in copies)
        return (a, b), (draw[0].astype(np.float64) @ draw[1]).astype(np.float32)

    @cached_property
    def _multiply(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """[devices, n, n] twice -> [devices, n, n], each device by itself."""
        multiply = jax.jit(jnp.matmul).lower(*self._known[0]).compile()
        jax.block_until_ready(multiply(*self._known[0]))  # the first call is slower
        return multiply


def checksum(x: jax.Array) -> jax.Array:
    """The sum of a float32 array's bits as uint32, modulo 2^32: a bit that flips changes it.

    A piece at a time: in one go a CPU would first write all bits to memory of their own, at a tenth of the speed.
    """
    flat = x.reshape(-1)
    n = min(flat.size, max(PIECE, -(-flat.size // MOST_PIECES)))

    def bits(start: jax.Array | int, size: int) -> jax.Array:
        return lax.bitcast_convert_type(lax.dynamic_slice(flat, (start,), (size,)), jnp.uint32)

    whole, rest = divmod(flat.size, n)
    none = vary(jnp.zeros(n, jnp.uint32), varying(x))
    total = jnp.sum(lax.fori_loop(0, whole, lambda i, sums: sums + bits(i * n, n), none), dtype=jnp.uint32)
    return total + jnp.sum(bits(whole * n, rest), dtype=jnp.uint32)


def bits_apart(found: np.ndarray, expected: np.ndarray) -> int:
    """In how many bits two float32 arrays differ."""
    return int(np.bitwise_count(found.view(np.uint32) ^ expected.view(np.uint32)).sum())


def differing(
    groups: Sequence[Sequence[Sequence[int]]],
    sums: Mapping[int, Sequence[int]],
    names: Sequence[str],
    ranks: Sequence[int],
) -> tuple[str, list[int] | None] | None:
    """What is said of copies that differ, and the ranks that are to blame, if that is known; None if all are the same.

    groups: for each parameter, the places that hold the same part of it; sums: of a place, its checksum of each parameter;
    ranks: of each place. Where most copies agree the others are to blame, and else the rank that has all of them.
    """
    blamed: dict[int, str] = {}
    unclear: dict[int, str] = {}
    for number, name in enumerate(names):
        for group in groups[number]:
            held = Counter(sums[place][number] for place in group)
            (common, count), *others = held.most_common()
            if not others:
                continue
            decided = 2 * count > len(group)
            apart = {ranks[place] for place in group if not decided or sums[place][number] != common}
            clear = decided or len(apart) == 1
            for rank in apart:
                (blamed if clear else unclear).setdefault(rank, name)
    if blamed:
        rank, name = min(blamed.items())
        who = f"rank {rank} holds" if len(blamed) == 1 else f"ranks {', '.join(map(str, sorted(blamed)))} hold"
        return f"{who} other bits of {name} than the devices that must have the same; nothing of it is saved.", sorted(
            blamed
        )
    if unclear:
        who = " and ".join(map(str, sorted(unclear)))
        name = unclear[min(unclear)]
        return f"ranks {who} hold different bits of {name}, which must be the same; whose are wrong is not known.", None
    return None
