"""Looks for what a message tells (a key, its value, what is legal) and leaves its wording open."""

import re


def tells(text: str, *parts: str) -> bool:
    """Returns whether one line of `text` holds all parts in this order, each of them as whole words."""

    def pattern(part: str) -> str:
        before = r"(?<!\w)" * part[0].isalnum()
        after = r"(?!\w)" * part[-1].isalnum()
        return before + re.escape(part) + after

    return re.search(".*?".join(map(pattern, parts)), text) is not None
