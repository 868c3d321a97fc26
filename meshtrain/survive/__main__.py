"""python -m meshtrain.survive --config FILE: one a node, until the last step is taken. Besides: status RUN, stats RUN, inject KIND@STEP:RANK."""

import socket
import sys
from collections.abc import Sequence

from meshtrain.cli import Parser, command
from meshtrain.config import ConfigError, load
from meshtrain.errors import short
from meshtrain.survive.records import NAME
from meshtrain.survive.supervisor import Supervisor

WORDS = ("status", "stats", "inject")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="python -m meshtrain.survive", description=__doc__)
    parser.add_config()
    parser.add_argument(
        "--node", default=socket.gethostname(), help="this node's name, one of its own in the run; default: the host's"
    )
    parser.add_argument("--address", default=None, help="how other nodes reach this one; default: the host's name")
    options = parser.parse_args(given)
    if not NAME.fullmatch(options.node):
        raise ConfigError(
            f"--node is {short(repr(options.node))}; a node's name has letters, digits, dots, dashes and underscores, at most 64, "
            "and begins with a letter or a digit."
        )
    config = load(options.config, options.set)
    address = options.address or ("127.0.0.1" if config.survive.most == 1 else socket.gethostname())
    return Supervisor(config, options.node, address).run()


if __name__ == "__main__":
    sys.exit(main())
