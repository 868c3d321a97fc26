"""A Hugging Face directory as a checkpoint of ours, which every command takes that takes a run's.

    HF_DIR/ ── box by box ──► the mesh ── global arrays ──► OUT/checkpoints/0/    weights alone, of step 0
                                                            OUT/config.yaml, hf_config.json, the tokenizer's files

`checkpoint.resume: OUT` begins a run with it, with or without `checkpoint.weights_only`.
"""

import math
from pathlib import Path

from meshtrain.adopt import extra_files
from meshtrain.checkpoint.arrays import freed_blocks_returned
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.saving import CheckpointError, Saver
from meshtrain.config import Config, to_yaml
from meshtrain.config.follow import put
from meshtrain.errors import ConfigError, say, short
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import TensorFiles
from meshtrain.hf.peft import Adapters, with_adapters
from meshtrain.run.directory import CHECKPOINTS, CONFIG
from meshtrain.step import Program


def import_weights(
    config: Config, directory: Path, out: Path, adapter: Path | None = None
) -> Program:
    """Writes the checkpoint, with the adapters of a directory of PEFT's if there is one.

    ConfigError if `out` is there, or `directory` does not hold the weights of the config's model.
    """
    extra_files.refuse_existing(out)
    extra_files.check(directory)
    files = TensorFiles(directory)
    adapters = None if adapter is None else Adapters(adapter, config.model)
    loading.check(config.model, files)
    for tensors in (files, *([] if adapters is None else [adapters.files])):
        loading.check_finite(tensors)
    config = with_adapters(config, adapters)
    program = Program(config)
    with freed_blocks_returned():
        params = loading.load(program.layout, files, adapters=adapters)
    config = put(config, run={"directory": str(out.absolute())})
    if (
        config.data.tokenizer == "byte"
        and "tokenizer.json" in extra_files.tokenizer_files(directory)
    ):
        config = put(config, data={"tokenizer": str(out.absolute() / "tokenizer.json")})
    with extra_files.written_aside(out.absolute()) as aside:
        saver = Saver(
            config,
            GlobalArrays(program, weights_alone=True),
            aside / CHECKPOINTS,
            say,
            {},
        )
        try:
            saver.save(0, params, math.nan, None)
            saver.wait()
        except CheckpointError as error:
            # without the step and the steps before it, which a run has
            reason = str(error).partition(": ")[2].rpartition("; ")[0]
            raise ConfigError(f"{short(out)} cannot be written: {reason}.") from None
        finally:
            saver.close()
        (aside / CONFIG).write_text(to_yaml(config))
        extra_files.copy(
            directory, aside, {name: files.dtype(name) for name in files.names}
        )
    return program
