"""`ssh`: a supervisor on each of some hosts, which see this directory under the same name (a shared file system).

Host keys are checked always, and nothing is asked: a host must be in known_hosts, and take a key. A connection that is
lost, or this process killed, ends the far supervisor as SIGTERM does: it stops with a checkpoint.
"""

import argparse
import os
import re
import shlex
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cli import DONE, Parser
from meshtrain.config import load
from meshtrain.config.load import config_files
from meshtrain.config.places import config_file
from meshtrain.errors import ConfigError, short
from meshtrain.launch.job import Launcher, absolute, add_flags, make
from meshtrain.launch.local_nodes import supervise_all

SSH = (
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=yes",
    "-o",
    "ServerAliveInterval=15",
)
HOST = re.compile(r"([a-z_][a-z0-9_.-]{0,31}@)?[A-Za-z0-9][A-Za-z0-9.-]{0,63}")
# sshd tells the far side of no signal, only of the end of its input. `$@` is the supervisor; a line of input is a
# signal's name.
FAR_SIDE = (
    'exec 3<&0 </dev/null; "$@" 3<&- & node=$!; '
    '{ while read -r name <&3; do kill -s "$name" "$node"; done; kill -s TERM "$node"; } 2>/dev/null & ear=$!; '
    'wait "$node"; code=$?; kill "$ear" 2>/dev/null; exit "$code"'
)


def add(parser: Parser) -> None:
    hosts = parser.add_mutually_exclusive_group(required=True)
    hosts.add_argument(
        "--hosts",
        metavar="HOST,HOST",
        help="names that every host resolves; USER@HOST is legal",
    )
    hosts.add_argument(
        "--hostfile", metavar="FILE", help="one host a line; # begins a comment"
    )
    parser.add_config()
    add_flags(parser)
    parser.add_argument(
        "--directory",
        type=absolute,
        help="where to start on the hosts (default: this directory)",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter on the hosts"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the commands, and run nothing"
    )


def run(options: argparse.Namespace) -> int:
    hosts = _hosts(options)
    for file in config_files(config_file(options.config)):
        refuse_others_files(str(file), "--config")
    directory = options.directory or os.getcwd()
    job = make(load(options.config, options.set), options, len(hosts), options.python)
    commands = {
        name: command(host, directory, job.supervisor) for name, host in hosts.items()
    }
    if options.print:
        print("\n".join(map(shlex.join, commands.values())))
        return DONE
    return supervise_all(commands, listens=True)


def command(host: str, directory: str, supervisor: Sequence[str]) -> list[str]:
    """Returns the ssh command of one host. The login shell there sees only quoted words."""
    name = host.rpartition("@")[2]
    words = shlex.join(
        [
            "exec",
            "sh",
            "-c",
            FAR_SIDE,
            "supervisor",
            *supervisor,
            "--node",
            name,
            "--address",
            name,
        ]
    )
    return [*SSH, "--", host, f"cd {shlex.quote(directory)} && {words}"]


def refuse_others_files(path: str, option: str) -> None:
    """Refuses a file that decides about commands and is another user's to change."""
    try:
        info = os.stat(path)
    except OSError:
        # Whoever reads it reports what is wrong.
        return
    if info.st_uid not in (os.geteuid(), 0):
        fault = "belongs to another user"
    elif info.st_mode & stat.S_IWOTH:
        fault = "can be written by everyone"
    else:
        return
    raise ConfigError(
        f"{option} {short(path)} {fault}; nothing is run from what others may write."
    )


def _hosts(options: argparse.Namespace) -> dict[str, str]:
    """Returns USER@HOST or HOST, as ssh takes it, by the name of the host."""
    if options.hostfile:
        refuse_others_files(options.hostfile, "--hostfile")
        where = f"--hostfile {short(options.hostfile)}"
        lines = Path(options.hostfile).read_text(errors="backslashreplace").splitlines()
        entries = [line.partition("#")[0].strip() for line in lines]
    else:
        where = "--hosts"
        entries = [host.strip() for host in options.hosts.split(",")]
    hosts: dict[str, str] = {}
    for host in filter(None, entries):
        name = host.rpartition("@")[2]
        if not HOST.fullmatch(host):
            raise ConfigError(
                f"{where}: {short(repr(host))} is not a host; write HOST or USER@HOST."
            )
        if name in hosts:
            raise ConfigError(
                f"{where}: {name} stands there twice; a node has one supervisor."
            )
        hosts[name] = host
    if not hosts:
        raise ConfigError(f"{where} names no host.")
    return hosts


LAUNCHERS = {"ssh": Launcher("run one node on each of several hosts", add, run)}
