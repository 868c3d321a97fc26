"""The figures of `meshtrain.survive`: python -m experiments.survive kinds|soak|alarms|cost

All runs are of tiny training processes on this machine; each prints its progress, and its table at the end. Whatever
else the machine does is in the times, so its load average stands beside them.
"""

import json
import sys
import tempfile
from pathlib import Path

from experiments import bench
from experiments.survive import costs, long
from experiments.survive.cluster import say
from experiments.survive.kinds import KINDS, Campaign
from experiments.survive.tables import print_kinds


def main() -> int:
    parser = bench.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    kinds = commands.add_parser(
        "kinds", help="each kind of fault, several times, on 2 and on 4 processes"
    )
    kinds.add_argument("--only", nargs="+", metavar="KIND", default=None)
    kinds.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    kinds.add_argument("--times", type=int, default=3)
    kinds.add_argument("--seed", type=int, default=0)
    soak = commands.add_parser(
        "soak", help="a fault every few minutes, until the run ends by itself"
    )
    soak.add_argument("--minutes", type=float, default=60.0)
    soak.add_argument(
        "--every", type=float, default=180.0, help="seconds between two faults"
    )
    soak.add_argument("--processes", type=int, default=4)
    soak.add_argument("--seed", type=int, default=0)
    alarms = commands.add_parser("alarms", help="a healthy run on a busy machine")
    alarms.add_argument("--minutes", type=float, default=30.0)
    alarms.add_argument("--load", type=int, default=15, help="busy processes beside it")
    alarms.add_argument("--processes", type=int, default=4)
    cost = commands.add_parser(
        "cost", help="the supervisors' share of a core, a decision, a beat"
    )
    cost.add_argument("--seconds", type=float, default=60.0)
    cost.add_argument("--processes", type=int, default=2)
    for command in (kinds, soak, alarms, cost):
        command.add_argument(
            "--work",
            type=Path,
            default=None,
            help="directory of the runs, kept; default: a temporary one",
        )
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="survive-"))
    work.mkdir(parents=True, exist_ok=True)
    say(f"runs and results are in {work}")
    if options.command == "soak":
        return long.soak(
            work, options.minutes, options.every, options.processes, options.seed
        )
    if options.command == "alarms":
        return long.alarms(work, options.minutes, options.load, options.processes)
    if options.command == "cost":
        return costs.cost(work, options.processes, options.seconds)
    results = work / "kinds.jsonl"
    chosen = options.only or list(KINDS)
    if unknown := set(chosen) - set(KINDS):
        parser.error(
            f"there is no kind {', '.join(sorted(unknown))}; legal are {', '.join(KINDS)}"
        )
    for processes in options.processes:
        Campaign(processes, work, results, options.seed).run(chosen, options.times)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    print_kinds(found)
    return int(any(one["problems"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
