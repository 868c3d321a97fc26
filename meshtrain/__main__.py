"""One word for all commands: `meshtrain train` runs the module `meshtrain.train`, and so does Python with `-m meshtrain
train`.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain import cli
from meshtrain.commands import COMMANDS, MODULES, listed
from meshtrain.config import load
from meshtrain.errors import nearest, say, short
from meshtrain.run import early
from meshtrain.run.versions import versions


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; without one prints the list."""
    early.hear()
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if name in ("", "-h", "--help"):
        print(listed())
        return 0
    if name == "--version":
        print(version())
        return 0
    if name not in COMMANDS:
        ending = nearest(name, COMMANDS) or f"; legal are {', '.join(COMMANDS)}."
        say(f"there is no command {short(name)}{ending}")
        return 2
    cli.typed = (
        "python -m meshtrain"
        if Path(sys.argv[0]).name == "__main__.py"
        else "meshtrain"
    )
    if name == "train" and (code := _refuse(rest[:-1])):
        return code
    sys.argv = [f"meshtrain.{name}", *rest[:-1]]
    # Ends by the command's own exit code.
    runpy.run_module(
        f"meshtrain.{MODULES.get(name, name)}", run_name="__main__", alter_sys=True
    )
    return 0


@cli.command
def _refuse(arguments: Sequence[str] | None) -> int:
    """Answers a mistake in a config within a second: `meshtrain.train` imports JAX before it reads one."""
    options = cli.train_parser().parse_args(arguments)
    path = Path(options.config)
    # A pipe can be read only once.
    if path.is_file() or not path.exists():
        load(options.config, options.set, reading=True)
    return cli.DONE


def version() -> str:
    """Returns the versions of the package and of JAX, and the devices that JAX has here."""
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # of which nothing is wanted but their names
    import jax

    known = versions()
    try:
        devices = jax.devices()
        there = f"{len(devices)} x {devices[0].device_kind}"
    except RuntimeError as error:
        there = f"no devices: {str(error).splitlines()[0]}"
    return f"meshtrain {known['meshtrain']}, JAX {known['jax']}, Python {known['python']}, {there}"


if __name__ == "__main__":
    sys.exit(main())
