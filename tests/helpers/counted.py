"""Which collectives of a compiled step are counted twice."""

from meshtrain import scopes


def before_or_after_the_ticks(source: str) -> bool:
    """Of the first embedding and of the last one's gradient: on CPU the share of ticks with work counts them among the ticks already."""
    return f"shard_map/{scopes.EMBEDDING}/cond/" in source
