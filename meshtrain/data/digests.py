"""By what a checkpoint knows the data that it was trained on."""

from meshtrain.config import Config
from meshtrain.data.split import SplitBatches


def digests(config: Config, data: SplitBatches, held_out: SplitBatches | None) -> dict[str, str]:
    """Of what is read; nothing of random tokens, nor of held-out text that is a share of the source."""
    found = {"digest": data.digest}
    if config.data.validation_source is not None and held_out is not None:
        found["validation_digest"] = held_out.digest
    return {name: digest for name, digest in found.items() if digest}
