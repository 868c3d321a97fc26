"""Parameter server against all-reduce: both train on fake devices, and the alpha-beta model says when each is faster.

    python -m experiments.communicate.parameter_server [--svg FILE]

First losses: in step a server computes what an all-reduce does; out of step staleness costs, unless the rate is divided. Then
seconds, of `server_time`, and a picture of where each wins.
"""

import argparse
import sys
from pathlib import Path

from experiments.communicate import draw, server_time
from experiments.communicate.draw import Axis, Line
from experiments.communicate.server_time import Network
from meshtrain.mesh import fake_devices

WORKERS, STEPS, RATE = 4, 120, 0.6
EVEN, STRAGGLING = (1.0,) * WORKERS, (1.0, 1.0, 1.0, 4.0)
TEN, FOUR_HUNDRED = Network(50e-6, 1.25e9), Network(10e-6, 50e9)  # Gbit/s: Ethernet, InfiniBand
MANY = (2, 4, 8, 16, 32, 64, 128, 256)
GRADIENTS = 1e8  # bytes: 25 million weights in float32
COMPUTE = 0.2  # seconds of a gradient on one worker


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.communicate.parameter_server", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--svg", type=Path, help="where the picture is written")
    options = parser.parse_args()
    fake_devices(WORKERS + 1)
    losses()
    seconds()
    if options.svg:
        draw.write(options.svg, picture(), 2, draw.legend(lines(), 2), 60)
    return 0


def losses() -> None:
    # after the devices are faked
    from experiments.communicate import servers

    task, gradients = servers.transformer(WORKERS), STEPS * WORKERS
    summed = servers.all_reduce(task, STEPS, RATE)
    in_step = servers.synchronous(task, STEPS, RATE, EVEN)
    apart = max(abs(a - b) for a, b in zip(summed.losses, in_step.losses, strict=True))
    print(f"{STEPS} steps of {WORKERS} workers: losses of server and all-reduce differ by {apart:.1e} at most\n")
    print(f"{'':42}{'seconds':>8}{'staleness':>20}{'held-out loss':>15}")
    runs = [
        ("all-reduce", summed),
        ("server in step", in_step),
        ("the same, a worker 4 times slower", servers.synchronous(task, STEPS, RATE, STRAGGLING)),
        ("out of step, rate / 4", servers.asynchronous(task, gradients, RATE / WORKERS, EVEN)),
        ("the same, a worker 4 times slower", servers.asynchronous(task, gradients, RATE / WORKERS, STRAGGLING)),
        ("out of step, rate not divided", servers.asynchronous(task, gradients, RATE, EVEN)),
    ]
    for name, run in runs:
        _, spent, loss = run.held_out[-1]
        stale = f"mean {sum(run.staleness) / len(run.staleness):.1f}, most {max(run.staleness)}"
        print(f"{name:42}{spent:8.0f}{stale:>20}{loss:15.3f}")


def seconds() -> None:
    print(f"\nms to sum {GRADIENTS / 1e6:.0f} MB over 16 workers, and from which number of servers they win")
    print(f"{'network':22}{'all-reduce':>12}{'1 server':>10}{'4':>8}{'16':>8}   wins from")
    for name, network in (("10 Gbit/s, 50 µs", TEN), ("400 Gbit/s, 10 µs", FOUR_HUNDRED)):
        summed = server_time.all_reduce(16, GRADIENTS, network)
        served = {s: server_time.server(16, GRADIENTS, s, network) for s in range(1, 17)}
        first = next((str(s) for s, spent in served.items() if spent < summed), "none")
        by_servers = f"{served[1] * 1e3:10.1f}{served[4] * 1e3:8.1f}{served[16] * 1e3:8.1f}"
        print(f"{name:22}{summed * 1e3:12.1f}{by_servers}   {first}")


def lines() -> list[Line]:
    """Milliseconds by the number of workers on 10 Gbit/s."""
    by_share = {"1 server": 0.0, "a server to 4 workers": 1 / 4, "a server to 2": 1 / 2, "a server to each": 1.0}
    summed = [(float(n), server_time.all_reduce(n, GRADIENTS, TEN) * 1e3) for n in MANY]
    served = [
        Line(name, [(n, server_time.server(n, GRADIENTS, shared(n, share), TEN) * 1e3) for n in MANY], colour, "5 3")
        for colour, (name, share) in enumerate(by_share.items(), 1)
    ]
    return [Line("all-reduce", summed), *served]


def shared(workers: int, share: float) -> int:
    """Servers of so many workers, at least one."""
    return max(1, round(workers * share))


def picture() -> list[list[str]]:
    workers = Axis("workers", [(n, str(n)) for n in MANY])
    spent = Axis("ms a sum of 100 MB, 10 Gbit/s", [(10.0**k, f"{10**k:,}") for k in range(1, 6)])
    counts = [str(n) for n in MANY]

    def served(share: float, nbytes: float = GRADIENTS) -> list[float]:
        pairs = [(n, shared(n, share)) for n in MANY]
        return [server_time.all_reduce(n, nbytes, TEN) / server_time.server(n, nbytes, s, TEN) for n, s in pairs]

    def straggling(spread: float) -> list[float]:
        return [
            server_time.in_step(n, GRADIENTS, FOUR_HUNDRED, COMPUTE, spread)
            / server_time.out_of_step(n, GRADIENTS, shared(n, 1 / 4), FOUR_HUNDRED, COMPUTE, spread)
            for n in MANY
        ]

    return [
        draw.chart("one server is the bottleneck", workers, spent, lines()),
        draw.tiles(
            "100 MB: how much faster servers are", "workers", counts, "servers a worker",
            [(name, served(share)) for name, share in (("1/8", 1 / 8), ("1/4", 1 / 4), ("1/2", 1 / 2), ("3/4", 3 / 4), ("1", 1.0))],
        ),
        draw.tiles(
            "a server to each worker: how much faster", "workers", counts, "bytes",
            [(name, served(1.0, nbytes)) for name, nbytes in (("10 kB", 1e4), ("100 kB", 1e5), ("1 MB", 1e6), ("10 MB", 1e7), ("100 MB", 1e8), ("1 GB", 1e9))],
        ),
        draw.tiles(
            "out of step, 400 Gbit/s: how much faster", "workers (a server to 4)", counts, "spread",
            [(f"{spread:.0%}", straggling(spread)) for spread in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)],
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
