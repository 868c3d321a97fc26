"""A model that is opened to be used: its weights on a mesh, its tokenizer, the tokens that end a text, its chat template."""

from dataclasses import dataclass

from meshtrain.data.tokenizer import ChatTokenizer
from meshtrain.generate.prompts import Conversations
from meshtrain.reader import Model


@dataclass(frozen=True)
class Opened:
    """What an engine needs of a model, and what its users do."""

    model: Model
    tokenizer: ChatTokenizer  # of plain text: a special token's text in it is text
    ends: frozenset[int]  # tokens that end a text, or a turn of a conversation
    template: Conversations | None  # None: the model takes no conversations
    name: str
    length: int = 256  # positions of a slot unless others are asked for
