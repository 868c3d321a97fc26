"""From the configuration to the batches of training and validation."""

from meshtrain.config import Config
from meshtrain.config.follow import row_multiple
from meshtrain.config.images import IMAGES
from meshtrain.data.batches import RowBatches, SplitBatches, TextBatches
from meshtrain.data.manifest import SPLITS
from meshtrain.data.tokenizer import Tokenizer, load_tokenizer
from meshtrain.errors import ConfigError
from meshtrain.inputs import a_config
from meshtrain.sources import SOURCES, has_documents


def open_data(config: Config) -> tuple[SplitBatches, SplitBatches | None]:
    """Opens training and validation batches, of text or of images; None if nothing is held out. Touches no device.

    Raises ConfigError (one sentence): a source that is not there or not whole, a tokenizer or classes too many for the
    model, too little text, nothing held out though eval.every asks for it.
    """
    data = a_config(config, "mt.open_data").data
    if data.format == IMAGES:
        from meshtrain.data.images.image_batches import open_images

        return open_images(config)
    tokenizer = load_tokenizer(data.tokenizer, begin=data.begin, end=data.end)
    _check_vocabulary(config, tokenizer)
    if not has_documents(data.source):
        opens = SOURCES[data.source].rows
        assert opens is not None, (
            f"{data.source} is registered without a function that opens it"
        )
        rows = (
            RowBatches(opens(config, split), config.train.global_batch_size, pad=False)
            for split in SPLITS
        )
        train, validation = (
            TextBatches(b, data.source, "", tokenizer, multiple=row_multiple(config))
            for b in rows
        )
        return train, validation
    from meshtrain.data.mixture import open_documents

    return open_documents(config, tokenizer)


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    size = config.model.vocab_size
    if tokenizer.vocab_size > size:
        ends = tokenizer.vocab_size == size + 1 == tokenizer.end_of_document + 1
        way_out = (
            ", or name the token that ends a document with data.end" if ends else ""
        )
        raise ConfigError(
            f"model.vocab_size {size} is less than the {tokenizer.vocab_size} tokens of data.tokenizer "
            f"{config.data.tokenizer}; give at least {tokenizer.vocab_size}{way_out}."
        )
