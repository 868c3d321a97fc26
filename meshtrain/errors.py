"""The one error that a user's input may cause: a sentence, not a traceback; and what goes into such a sentence."""

LONGEST, ENDING = 200, 60  # characters of a user's value that a sentence repeats, and how many of them are its last


class ConfigError(ValueError):
    """Bad input, told in one plain sentence: what, where, what is legal. The commands print it and exit with code 2."""


def refusal(error: OSError) -> str:
    """What the system said, to stand within a sentence: no space left on device."""
    return (error.strerror or str(error)).lower()


def short(value: object) -> str:
    """A user's text as a sentence may repeat it: in one line, its middle left out where it is huge."""
    text = str(value)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - ENDING]}…{text[-ENDING:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
