"""A Hugging Face directory as a checkpoint of ours, which every command takes that takes a run's.

    HF_DIR/ ── box by box ──► the mesh ── canonical ──► OUT/checkpoints/0/    weights alone: a run that begins with it begins at step 0
                                                        OUT/config.yaml, hf_config.json, the tokenizer's files

`checkpoint.resume: OUT` begins a run with it, with or without `checkpoint.weights_only`.
"""

import math
from pathlib import Path

from meshtrain.adopt import beside, loading
from meshtrain.adopt.adapters import Adapters, with_adapters
from meshtrain.adopt.aside import refuse_taken, written_aside
from meshtrain.checkpoint.canonical import Canonical
from meshtrain.checkpoint.host_memory import freed_blocks_returned
from meshtrain.checkpoint.saving import CheckpointError, Saver
from meshtrain.config import Config, to_yaml
from meshtrain.config.follow import put
from meshtrain.errors import ConfigError, say, short
from meshtrain.run.directory import CHECKPOINTS, CONFIG
from meshtrain.step import Program


def import_weights(config: Config, directory: Path, out: Path, adapter: Path | None = None) -> Program:
    """Writes the checkpoint, with the adapters of a directory of PEFT's if there is one.

    ConfigError if `out` is there, or `directory` does not hold the weights of the config's model.
    """
    refuse_taken(out)
    adapters = None if adapter is None else Adapters(adapter, config.model)
    config = with_adapters(config, adapters)
    program = Program(config)
    with freed_blocks_returned():
        params = loading.read(program.layout, directory, adapters=adapters)
    config = put(config, run={"directory": str(out.absolute())})
    if config.data.tokenizer == "byte" and "tokenizer.json" in beside.tokenizer_files(directory):
        config = put(config, data={"tokenizer": str(out.absolute() / "tokenizer.json")})
    with written_aside(out.absolute()) as aside:
        saver = Saver(config, Canonical(program, weights_alone=True), aside / CHECKPOINTS, say, {})
        try:
            saver.save(0, params, math.nan, None)
            saver.wait()
        except CheckpointError as error:
            # what is said of a run's steps is nothing here
            reason = str(error).partition(": ")[2].rpartition("; ")[0]
            raise ConfigError(f"{short(out)} cannot be written: {reason}.") from None
        finally:
            saver.close()
        (aside / CONFIG).write_text(to_yaml(config))
        beside.keep(directory, aside)
    return program
