"""python -m meshtrain.check_gpu: whether an accelerator computes what the CPU does, and what it gives."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from meshtrain.check_gpu.cases import CASES
from meshtrain.check_gpu.compared import Children, Difference, difference
from meshtrain.cli import DONE, FAILED, Parser, check_target, command, write_target
from meshtrain.cluster.accelerators import ACCELERATORS, canonical, reaching
from meshtrain.errors import ConfigError, nearest, say

DESCRIPTION = (
    "Takes small runs of every feature on this machine's accelerator and on its CPU, compares losses and gradients, "
    "and measures matrix products and memory beside the planner's rates."
)
SECONDS = 300.0


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    for name in options.names:
        if name not in CASES:
            legal = nearest(name, CASES) or f"; legal are {', '.join(CASES)}."
            raise ConfigError(f"there is no check {name!r}{legal}")
    if options.output:
        check_target(options.output)
    names = options.names or list(CASES)
    here, differences = _compare(names, options.seconds)
    rates = _rates(here.device, options.seconds)
    if not here.device.get("platform") or here.device["platform"] == "cpu":
        say("no accelerator was found: the CPU was compared with itself.")
    report = {
        "device": here.device,
        "checks": {d.name: vars(d) | {"right": d.is_right} for d in differences},
        "rates": rates,
    }
    if options.output:
        write_target(options.output, json.dumps(report, indent=2) + "\n")
    wrong = [d.name for d in differences if not d.is_right]
    if wrong:
        say(f"{len(wrong)} of {len(names)} checks are wrong: {', '.join(wrong)}.")
    return FAILED if wrong else DONE


def parser() -> Parser:
    parser = Parser(prog="python -m meshtrain check-gpu", description=DESCRIPTION)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="CHECK",
        help=f"which checks (default: all): {'; '.join(CASES)}",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="N",
        help="time limit for all checks together (default: 300)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="writes device, versions, differences and rates as JSON, for a bug report",
    )
    return parser


def _compare(names: Sequence[str], seconds: float) -> tuple[Children, list[Difference]]:
    """Returns what the accelerator's children told, and the difference of each run; a line is shown as it is known."""
    began = time.monotonic()
    here = Children("")
    cpu = Children("cpu")
    differences: dict[str, Difference] = {}
    print(f"{'check':22} {'loss':>8} {'norm':>8}  relative to the CPU's", flush=True)

    def told() -> None:
        for name in names:
            if name not in differences and name in here.lines and name in cpu.lines:
                differences[name] = difference(name, here.lines[name], cpu.lines[name])
                _show(differences[name])

    threads = [thread for group in (here, cpu) for thread in group.start(names, told)]
    for thread in threads:
        thread.join(max(0.0, began + seconds - time.monotonic()))
    for group in (here, cpu):
        group.end()
        for error in group.errors:
            say(error)
    for name in names:
        if name not in differences:
            differences[name] = difference(
                name, here.lines.get(name), cpu.lines.get(name)
            )
            _show(differences[name])
    return here, [differences[name] for name in names]


def _show(found: Difference) -> None:
    figures = (
        f"{x:8.1e}" if x is not None else 8 * " " for x in (found.loss, found.norm)
    )
    print(f"{found.name:22} {' '.join(figures)}  {found.verdict}".rstrip(), flush=True)


def _rates(device: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns FLOP/s of products by dtype and bytes/s of memory, measured and as plans have them; {} if that fails."""
    probe = [
        sys.executable,
        "-m",
        "meshtrain.probe",
        "--only",
        "products",
        "--mesh",
        "data=1",
    ]
    try:
        done = subprocess.run(
            [*probe, "--json"],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        say(f"the rates of products were not measured: {error}")
        return {}
    together = json.loads(done.stdout)["all_at_once"]
    measured = {**together["matmul_flops"], "memory": together["memory_bandwidth"]}
    planned: dict[str, float] = {}
    if (name := canonical(device.get("kind", ""))) in ACCELERATORS:
        known = reaching(ACCELERATORS[name], 1)
        planned = {
            dtype: known.flops(dtype) * known.efficiency.matmul
            for dtype in together["matmul_flops"]
        }
        planned["memory"] = known.memory_rate
    for what, rate in measured.items():
        unit = "TB/s" if what == "memory" else "TFLOP/s"
        beside = f", planned {planned[what] / 1e12:,.3g}" if what in planned else ""
        print(f"{what:22} {rate / 1e12:,.3g} {unit}{beside}")
    return {"measured": measured, "planned": planned}


if __name__ == "__main__":
    sys.exit(main())
