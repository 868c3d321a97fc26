"""The one error that a user's input may cause: a sentence, not a traceback; and what the system refuses, in words for such a sentence."""


class ConfigError(ValueError):
    """Bad input, told in one plain sentence: what, where, what is legal. The commands print it and exit with code 2."""


def refusal(error: OSError) -> str:
    """What the system said, to stand within a sentence: no space left on device."""
    return (error.strerror or str(error)).lower()
