"""Compressions of gradients by name: what `parallel.reduce.compression` takes.

    none
    bfloat16, float8, int8, int4   few bits a number; the last three in blocks with a scale each     Wang et al. 2023
    topk                           the largest alone, with their places                              Aji & Heafield 2017
    powersgd                       two thin matrices in the place of a gradient                      Vogels et al. 2019

One from outside: `COMPRESSIONS.register(Compression("mine", sizes=..., codec=...))` before the config is loaded. No JAX here; bytes stand
in `parallel.reduce.sizes`, encoding and decoding in `parallel.reduce.codecs`.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshtrain.registry import Registry

Keys = Any  # the section `parallel.reduce` of a config


@dataclass(frozen=True)
class Compression:
    """One way to send a gradient.

    sizes: (parallel.reduce) -> the bytes it makes of a row, as `parallel.reduce.sizes.BlockSizes`; None: no codec makes bytes of rows.
    codec: (*fields of the sizes) -> `parallel.reduce.codecs.Codec`.
    fed_back: what it leaves out of a step must come with a later one, or training stands still (Karimireddy et al. 2019).
    in_blocks: rows may be joined to one message, each with blocks of its own.
    low_rank: PowerSGD's sums of two matrices. sorts: it looks for the largest numbers of a row.
    """

    name: str
    sizes: Callable[[Keys], Any] | None = None
    codec: Callable[..., Any] | None = None
    fed_back: bool = False
    in_blocks: bool = False
    low_rank: bool = False
    sorts: bool = False


def _late(name: str) -> Callable[..., Any]:
    """`module:Class` of `parallel.reduce`, imported when the first one is made."""
    return lambda *fields: pkgutil.resolve_name(f"meshtrain.parallel.reduce.{name}")(*fields)


_BLOCKS, _TOPK = _late("sizes:BlockSizes"), _late("sizes:TopKSizes")
COMPRESSIONS = Registry(
    Compression("none"),
    Compression("bfloat16", lambda reduce: _BLOCKS(16, 0), _late("codecs:Bfloat16"), in_blocks=True),
    Compression("float8", lambda reduce: _BLOCKS(8, reduce.block), _late("codecs:Float8"), in_blocks=True),
    Compression("int8", lambda reduce: _BLOCKS(8, reduce.block), _late("codecs:Int8"), in_blocks=True),
    Compression("int4", lambda reduce: _BLOCKS(4, reduce.block), _late("codecs:Int4"), fed_back=True, in_blocks=True),
    Compression("topk", lambda reduce: _TOPK(reduce.ratio), _late("codecs:TopK"), fed_back=True, sorts=True),
    Compression("powersgd", fed_back=True, low_rank=True),
)
