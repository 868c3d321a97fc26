"""From text to the same global batches on any mesh: `open_data` for the batches of a config, `Loader` to have them ahead of time."""

from meshtrain.data.loader import Loader
from meshtrain.data.open import TextBatches, open_data

__all__ = ["Loader", "TextBatches", "open_data"]
