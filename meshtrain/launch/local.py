"""`local N`: N nodes on this machine, to try a run on several of them, and to test it."""

import argparse
import sys

from meshtrain.cli import Parser, whole_number
from meshtrain.config import load
from meshtrain.launch import processes
from meshtrain.launch.job import add_flags, make

ADDRESS = "127.0.0.1"


def add(parser: Parser) -> None:
    parser.add_argument("nodes", type=whole_number, metavar="N", help="nodes, each with a share of the mesh's devices")
    parser.add_config()
    add_flags(parser)


def run(options: argparse.Namespace) -> int:
    job = make(load(options.config, options.set), options, options.nodes, sys.executable)
    return processes.run(
        {
            f"n{number}": [*job.supervisor, "--node", f"n{number}", "--address", ADDRESS]
            for number in range(options.nodes)
        }
    )
