"""Which collectives of a compiled step are counted twice."""

from meshtrain import xla


def before_or_after_the_clocks(source: str) -> bool:
    """Of the first embedding and of the last one's gradient: on CPU the share of clocks with work counts them among the
    clocks already.
    """
    return f"shard_map/{xla.EMBEDDING}/cond/" in source
