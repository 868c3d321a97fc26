"""Configs of others as ours: what LLaMA-Factory's YAML and DeepSpeed's JSON ask for, in the keys of `config.schema`.

    key_rows.py        what a row of a table says of one key of theirs, and the facts that come of all keys
    llama_factory.py   a row a key: what it becomes here, or why it is left out
    deepspeed.py       the same
    following.py       what follows from several keys together: batch and mesh, warm-up, evaluation, what is trained
    converting.py      files to the YAML, with what was left out in its comments

No key of theirs is passed over in silence: it is mapped, or named with the reason.
"""

from meshtrain.adopt.configs.converting import convert

__all__ = ["convert"]
