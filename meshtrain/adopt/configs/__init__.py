"""Configs of others as ours: what LLaMA-Factory's YAML and DeepSpeed's JSON ask for, in the keys of `config.schema`.

    reading.py         a file, and each key of it with the line that it stands in
    llama_factory.py   a row a key: what it becomes here, or why it is left out
    deepspeed.py       the same
    rows.py            what such a row says
    merging.py         of several files one value a key; two that differ are refused, with both and where they stand
    following.py       what follows from several keys together: batch and mesh, warm-up, evaluation, what is trained
    writing.py         the YAML, with what was left out in its comments

No key of theirs is passed over in silence: it is mapped, or named with the reason.
"""

from meshtrain.adopt.configs.writing import convert

__all__ = ["convert"]
