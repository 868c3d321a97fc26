"""Compressions of gradients by name: what `parallel.reduce.compression` takes.

    none
    bfloat16, float8, int8, int4   few bits a number; the last three in blocks with a scale each     Wang et al. 2023
    topk                           the largest alone, with their places                              Aji & Heafield 2017
    powersgd                       two thin matrices in the place of a gradient                      Vogels et al. 2019

One from outside: `COMPRESSIONS.register(Compression("mine", codec=...))` before the config is loaded, and all of it
stands in one file. The built-in ones are in `parallel.reduce.codecs`, imported when a config asks for one.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshtrain.registry import Registry

Keys = Any  # the section `parallel.reduce` of a config
Codec = Any  # `parallel.reduce.codecs.Codec`: bytes of a row, encode, decode


@dataclass(frozen=True)
class Compression:
    """One way to send a gradient.

    codec: (parallel.reduce) -> its `Codec`; None: no codec makes bytes of rows.
    fed_back: what it leaves out of a step must come with a later one, or training stands still (Karimireddy et al.
    2019).
    in_blocks: rows may be joined to one message, each with blocks of its own.
    low_rank: PowerSGD's sums of two matrices. sorts: it looks for the largest numbers of a row.
    """

    name: str
    codec: Callable[[Keys], Codec] | None = None
    fed_back: bool = False
    in_blocks: bool = False
    low_rank: bool = False
    sorts: bool = False


def codec_of(reduce: Keys) -> Any:
    """Returns the codec that a config asks for; None where no codec makes bytes of rows."""
    codec = COMPRESSIONS[reduce.compression].codec
    if codec is None:
        return None
    return codec(reduce)


def _late(name: str, *keys: str) -> Callable[[Keys], Codec]:
    """A class of `parallel.reduce.codecs`, made with these keys of `parallel.reduce`."""

    def make(reduce: Keys) -> Codec:
        return pkgutil.resolve_name(f"meshtrain.parallel.reduce.codecs:{name}")(
            *(getattr(reduce, key) for key in keys)
        )

    return make


COMPRESSIONS = Registry(
    Compression("none"),
    Compression("bfloat16", _late("Bfloat16"), in_blocks=True),
    Compression("float8", _late("Float8", "block"), in_blocks=True),
    Compression("int8", _late("Int8", "block"), in_blocks=True),
    Compression("int4", _late("Int4", "block"), fed_back=True, in_blocks=True),
    Compression("topk", _late("TopK", "ratio"), fed_back=True, sorts=True),
    Compression("powersgd", fed_back=True, low_rank=True),
)
