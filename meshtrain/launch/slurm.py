"""`slurm`: a script for sbatch.

The step's exit code is the highest of its tasks' (srun(1)), a killed one's 128 and more: it says how a node ended, not what the run came
to. So the script asks the run directory, where the supervisors have agreed. With --no-kill the job outlives a node; --signal tells the
supervisors, not the script, before the time is over (sbatch(1)), and they stop with 75; the script has itself queued again.
"""

import argparse
import shlex

from meshtrain.cli import Parser
from meshtrain.launch.job import GRACE, add_engine, add_requeues, add_time, engine_job, word

SCRIPT = """\
#!/bin/bash
{settings}
# One supervisor a node; what happens to one is no reason to end the others.
# Codes: 0 done, 1 failed, 2 wrong config, 3 given up, 75 stopped: that one goes back into the queue.

run={run}
before=$({outcome} "$run") || exit
{srun} \\
  {supervisor}
code=$?
if [ "$code" -ne 0 ]; then
  {outcome} "$run" --after "$before" --otherwise "$code"
  code=$?
fi
if [ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
  scontrol requeue "$SLURM_JOB_ID" || echo "cannot be queued again; submit the script again to go on" >&2
fi
exit "$code"
"""


def add(parser: Parser) -> None:
    add_engine(parser)
    add_time(parser)
    parser.add_argument("--partition", type=word)
    parser.add_argument("--account", type=word)
    add_requeues(parser)


def text(options: argparse.Namespace) -> str:
    """The script; what a user gave stands in it quoted, or is a plain word."""
    job, cores = engine_job(options), options.cpus_per_node
    settings = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices or None,
        "cpus-per-task": cores,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": f"{job.name}-%j.out",
        "open-mode": "append",
        "signal": f"TERM@{GRACE}",
    }
    # A step does not take over how many cores a task of the job has; without a number the whole node is taken, and no core bound.
    share = f"--cpus-per-task={cores}" if cores else "--cpu-bind=none"
    lines = [f"#SBATCH --{name}={value}" for name, value in settings.items() if value is not None]
    lines += [f"#SBATCH --{flag}" for flag in ("requeue", "no-kill", *(() if cores else ("exclusive",)))]
    return SCRIPT.format(
        settings="\n".join(lines),
        run=shlex.quote(job.run),
        outcome=shlex.join([options.python, "-m", "meshtrain.launch.outcome"]),
        srun=f"srun --label --kill-on-bad-exit=0 --no-kill {share}",
        supervisor=shlex.join(job.supervisor),
        requeues=options.requeues,
    )
