"""Makes objects show themselves: a picture in a notebook, a few lines of text elsewhere.

The pictures are made in `pictures`, above all that they show.
"""

import importlib
from typing import Any


class Shown:
    """A class whose instances show themselves.

    `pictures` is found by name, since it stands above whoever shows itself.
    """

    def _repr_html_(self) -> str:
        return _picture(self).html

    def __repr__(self) -> str:
        return _picture(self).text


def _picture(thing: Shown) -> Any:
    return importlib.import_module("meshtrain.pictures").show(thing)
