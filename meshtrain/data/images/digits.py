"""Source `digits`: 1797 handwritten digits of 8 x 8 pixels, which scikit-learn brings along (Alpaydin and Kaynak 1998)."""

import hashlib

import numpy as np

from meshtrain.config import Config
from meshtrain.data.images.arrays import Array
from meshtrain.data.images.source import ImageSource, held_out_share, numbered
from meshtrain.errors import ConfigError

HELD_OUT = 360 / 1797


def open_digits(config: Config) -> ImageSource:
    """Their numbers go from 0 to 16. 360 are held out, always the same, unless data.validation says how many."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "the digits of data.source digits come with scikit-learn, which is not installed: pip install 'meshtrain[vision]'."
        ) from None
    found = load_digits()
    pixels, labels = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None], found.target.astype(np.int32)
    share = HELD_OUT if config.data.validation is None else config.data.validation
    content = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    pictures = Array("digits", pixels, labels, config.model.channels)
    return ImageSource("digits", pictures, held_out_share(len(labels), share), tuple(numbered(10)), content)
