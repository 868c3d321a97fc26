"""A module that is also the function of its own name, so that `mt.train` is one thing whatever was imported before."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """Importing `meshtrain.train` sets the package's attribute `train` to the module, and no package can keep it from
    that.

    So the module itself takes calls: `mt.train(config)`, `meshtrain.train.main()` and `from meshtrain.train import
    train` all work, in any order of imports.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)


def callable_as(module: str, function: Callable[..., Any]) -> None:
    """Makes a call of the module (its __name__) a call of `function`."""
    imported: Any = sys.modules[module]
    imported.__class__ = CallableModule
    imported.function = function
