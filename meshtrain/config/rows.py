"""How many rows a batch has, where those that the data holds and those that a mesh can share are not the same.

    train.uneven_batch: pad     7 rows on data 2 x microbatches 2:   r r r r   r r r 0      0: an empty row, which weighs nothing

Config, data, program and planner all ask here.
"""

from meshtrain.config.schema import Config


def pieces(config: Config) -> int:
    """Into how many microbatches, over all data ranks, a batch is cut."""
    return config.mesh.data * config.parallel.microbatches


def row_multiple(config: Config) -> int:
    """What the rows of a batch are filled up to a multiple of; 1 where nothing is filled up."""
    return pieces(config) if config.train.uneven_batch == "pad" else 1


def filled_up(rows: int, multiple: int) -> int:
    """The next multiple."""
    return -(-rows // multiple) * multiple


def filled_rows(config: Config) -> int:
    """Rows of a batch on the devices: train.global_batch_size and what fills it up."""
    return filled_up(config.train.global_batch_size, row_multiple(config))


def sequences(config: Config) -> int:
    """Rows of one microbatch on one data rank, those that fill it up counted."""
    return filled_rows(config) // pieces(config)
