"""Parameter server against all-reduce: both train on fake devices, and the alpha-beta model says when each is faster.

    python -m experiments.communicate.parameter_server

First losses: in step a server computes what an all-reduce does; out of step staleness costs, unless the rate is
divided. Then seconds, of `server_time`.
"""

from experiments import bench
from experiments.bench import Table
from experiments.communicate import server_time
from experiments.communicate.server_time import Network
from meshtrain.mesh import fake_devices

WORKERS, STEPS, RATE = 4, 120, 0.6
EVEN, STRAGGLING = (1.0,) * WORKERS, (1.0, 1.0, 1.0, 4.0)
# Gbit/s: Ethernet, InfiniBand
TEN, FOUR_HUNDRED = Network(50e-6, 1.25e9), Network(10e-6, 50e9)
GRADIENTS = 1e8  # bytes: 25 million weights in float32


def main() -> None:
    bench.parser(__doc__).parse_args()
    fake_devices(WORKERS + 1)
    losses()
    seconds()


def losses() -> None:
    # after the devices are faked
    from experiments.communicate import servers

    task, gradients = servers.transformer(WORKERS), STEPS * WORKERS
    summed = servers.all_reduce(task, STEPS, RATE)
    in_step = servers.synchronous(task, STEPS, RATE, EVEN)
    apart = max(abs(a - b) for a, b in zip(summed.losses, in_step.losses, strict=True))
    title = f"{STEPS} steps of {WORKERS} workers: losses of server and all-reduce differ by {apart:.1e} at most"
    table = Table(
        "run                              ",
        "seconds",
        "staleness         ",
        "held-out loss",
        title=title,
    )
    runs = [
        ("all-reduce", summed),
        ("server in step", in_step),
        (
            "the same, a worker 4 times slower",
            servers.synchronous(task, STEPS, RATE, STRAGGLING),
        ),
        (
            "out of step, rate / 4",
            servers.asynchronous(task, gradients, RATE / WORKERS, EVEN),
        ),
        (
            "the same, a worker 4 times slower",
            servers.asynchronous(task, gradients, RATE / WORKERS, STRAGGLING),
        ),
        (
            "out of step, rate not divided",
            servers.asynchronous(task, gradients, RATE, EVEN),
        ),
    ]
    for name, run in runs:
        _, spent, loss = run.held_out[-1]
        stale = f"mean {sum(run.staleness) / len(run.staleness):.1f}, most {max(run.staleness)}"
        table.row(name, f"{spent:.0f}", stale, f"{loss:.3f}")


def seconds() -> None:
    title = f"ms to sum {GRADIENTS / 1e6:.0f} MB over 16 workers, and from which number of servers they win"
    table = Table(
        "network           ",
        "all-reduce",
        "1 server",
        "     4",
        "    16",
        "wins from",
        title=title,
    )
    for name, network in (
        ("10 Gbit/s, 50 µs", TEN),
        ("400 Gbit/s, 10 µs", FOUR_HUNDRED),
    ):
        summed = server_time.all_reduce(16, GRADIENTS, network)
        served = {
            s: server_time.server(16, GRADIENTS, s, network) for s in range(1, 17)
        }
        first = next((str(s) for s, spent in served.items() if spent < summed), "none")
        table.row(
            name,
            *(
                f"{1e3 * spent:.1f}"
                for spent in (summed, served[1], served[4], served[16])
            ),
            first,
        )


if __name__ == "__main__":
    main()
