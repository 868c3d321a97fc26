"""The one error that a user's input may cause: a sentence, not a traceback."""


class ConfigError(ValueError):
    """Bad input, told in one plain sentence: what, where, what is legal. The commands print it and exit with code 2."""
