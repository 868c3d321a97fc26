"""`slurm`: a script for sbatch.

The step's exit code is the highest of its tasks' (srun(1)), a killed one's 128 and more: it says how a node ended, not
what the run came to. So the script asks the run directory, where the supervisors have agreed. With --no-kill the job
outlives a node; --signal tells the supervisors, not the script, before the time is over (sbatch(1)), and they stop with
75; the script has itself queued again.

Slurm starts no task again, so that each node starts its own supervisor again after a kill. The script runs on the first
node. When that is lost the other nodes go on, and with it is lost who would end the job: they end it, or queue it
again, when the run is over.
"""

import argparse
import re
import shlex
import textwrap
from pathlib import Path

from meshtrain.cli import Parser
from meshtrain.errors import ConfigError, refusal, short
from meshtrain.launch.job import (
    GRACE,
    Launcher,
    absolute,
    add_engine,
    add_requeues,
    add_time,
    again,
    engine_job,
    text_of,
    word,
)

# Options that are not a template's: one supervisor a node follows from them. What to do instead.
GONE = "leave it out"
OWN = {
    "nodes": "give --nodes to this command",
    "cpus-per-task": "give --cpus-per-node to this command",
    "ntasks": GONE,
    "ntasks-per-node": GONE,
    "array": GONE,
    "signal": GONE,
}
LETTERS = {
    "-N": "nodes",
    "-c": "cpus-per-task",
    "-n": "ntasks",
    "-a": "array",
    "-J": "job-name",
    "-t": "time",
    "-p": "partition",
    "-A": "account",
    "-q": "qos",
    "-C": "constraint",
    "-D": "chdir",
    "-o": "output",
}
SCRIPT = """\
#!/bin/bash
{settings}
# One supervisor a node; what happens to one is no reason to end the others. Paths begin in {where}.
# Codes: 0 done, 1 failed, 2 wrong config, 3 given up, 75 stopped: that one goes back into the queue.
{template}
run={run}
# Written when the first node, where this script runs, has ended.
ended=.meshtrain-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}

requeue() {{
  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {requeues} ] || ! scontrol requeue "$SLURM_JOB_ID"; then
    echo "cannot be queued again; submit the script again to go on" >&2
    return 1
  fi
}}

node() {{
  trap 'left=0' TERM # the supervisor gets it too
{again}
  if [ "$SLURM_NODEID" -eq 0 ]; then touch "$ended"; fi
  for _ in {{1..{patience}}}; do
    if [ -e "$ended" ]; then exit "$code"; fi
    sleep 1
  done
  # Nobody hears of this node's end if the first one is lost; without this the job would hold its nodes.
  if ! timeout 10 bash -c ": </dev/tcp/$SLURM_SRUN_COMM_HOST/$SLURM_SRUN_COMM_PORT" 2>/dev/null; then
    case $code in
      75) requeue || scancel "$SLURM_JOB_ID" ;;
      0 | 3) scancel "$SLURM_JOB_ID" ;;
    esac
  fi
  exit "$code"
}}

before=$({outcome} "$run") || exit
export -f node requeue
export ended
{srun} bash -c node
code=$?
rm -f "$ended"
if [ "$code" -ne 0 ]; then
  {outcome} "$run" --after "$before" --otherwise "$code"
  code=$?
fi
if [ "$code" -eq 75 ]; then requeue; fi
exit "$code"
"""
PATIENCE = 30  # seconds that the first node may take to end after the others


def add(parser: Parser) -> None:
    add_engine(parser)
    add_time(parser)
    for name, of in (
        ("partition", word),
        ("account", word),
        ("qos", word),
        ("constraint", _constraint),
    ):
        parser.add_argument(f"--{name}", type=of)
    parser.add_argument(
        "--mail-user",
        type=text_of("[^\\s@]+@[^\\s@]+", "is not a mail address"),
        metavar="ADDRESS",
        help="hears of the job's end, and of each requeue",
    )
    parser.add_argument(
        "--directory",
        type=absolute,
        help="where paths of the config begin (default: where sbatch is called)",
    )
    parser.add_argument(
        "--template",
        metavar="FILE",
        help="your site's script: its #SBATCH lines win over ours, its commands (module load, a virtual environment) "
        "come before srun",
    )
    add_requeues(parser)


def text(options: argparse.Namespace) -> str:
    """The script; what a user gave stands in it quoted, or is a plain word."""
    job = engine_job(options)
    cores = options.cpus_per_node
    settings = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices or None,
        "cpus-per-task": cores,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": shlex.quote(options.constraint) if options.constraint else None,
        "mail-user": options.mail_user,
        "mail-type": "END,FAIL,REQUEUE" if options.mail_user else None,
        "chdir": shlex.quote(options.directory) if options.directory else None,
        "output": f"{job.name}-%j.out",
        "open-mode": "append",
        "signal": f"TERM@{GRACE}",
        **dict.fromkeys(("requeue", "no-kill", *(() if cores else ("exclusive",))), ""),
    }
    theirs, commands = _template(options.template) if options.template else ({}, "")
    lines = [
        f"#SBATCH --{name}" + (f"={value}" if value != "" else "")
        for name, value in settings.items()
        if value is not None and name not in theirs
    ]
    # A step does not take over how many cores a task of the job has; without a number the whole node is taken, and no
    # core bound.
    share = f"--cpus-per-task={cores}" if cores else "--cpu-bind=none"
    return SCRIPT.format(
        settings="\n".join([*lines, *dict.fromkeys(theirs.values())]),
        where=options.directory or "the directory in which sbatch is called",
        template=f"\n{commands}\n" if commands else "",
        run=shlex.quote(job.run),
        outcome=shlex.join([options.python, "-m", "meshtrain.survive.agreed"]),
        srun=f"srun --label --kill-on-bad-exit=0 --no-kill --export=ALL {share}",
        again=textwrap.indent(again(job), "  ").rstrip(),
        requeues=options.requeues,
        patience=PATIENCE,
    )


def _template(path: str) -> tuple[dict[str, str], str]:
    """Returns a template's #SBATCH lines, by option, and its commands. ConfigError for options that are ours."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = refusal(error) if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"--template {short(path)} cannot be read: {reason}."
        ) from None
    settings = {}
    commands = []
    for number, line in enumerate(lines, 1):
        if not line.startswith("#SBATCH"):
            commands += [] if number == 1 and line.startswith("#!") else [line]
            continue
        for option in re.findall(
            r"(?<=\s)(?:--[a-z-]+|-[A-Za-z])", line.partition(" #")[0]
        ):
            name = LETTERS.get(option, option.lstrip("-"))
            if name in OWN:
                raise ConfigError(
                    f"{short(path)}, line {number}: {option} is meshtrain's own, for one supervisor a node; "
                    f"{OWN[name]}."
                )
            settings[name] = line
    return settings, "\n".join(commands).strip()


_constraint = text_of(
    r"[A-Za-z0-9][A-Za-z0-9._,&|*()\[\]:-]*",
    "is not a constraint of Slurm's, such as h100 or rack1&ib",
)

LAUNCHERS = {
    "slurm": Launcher(
        "print a script for sbatch", add, text=text, hint="submit it with sbatch"
    )
}
