"""Pillow, where it is needed: of the extra `vision`, imported late."""

from types import ModuleType

from meshtrain.errors import ConfigError


def pillow(why: str) -> ModuleType:
    """PIL.Image; ConfigError, of which `why` is the beginning (resizing images), where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            f"{why} needs the Pillow library, which is not installed: pip install 'meshtrain[vision]'."
        ) from None
    return Image
