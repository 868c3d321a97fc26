"""From text to the same global batches on any mesh: `open_data` for the batches of a config, `Loader` to have them ahead of time."""

from meshtrain.data.from_config import TextBatches, open_data
from meshtrain.data.loader import Loader

__all__ = ["Loader", "TextBatches", "open_data"]
