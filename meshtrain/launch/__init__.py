"""What starts a run on several nodes: one supervisor a node, `python -m meshtrain.survive`, and its exit code handed to who can start it again.

    local N, ssh                        run the supervisors, and end when they have
    slurm, jobset, trainjob, ray, sky   print what that engine takes, and run nothing

- `meshtrain.launch.job`: what every way needs: nodes, devices a node, the supervisor's command.
- `meshtrain.launch.outcome`: what a run came to, of the exit codes of its supervisors.
- `meshtrain.launch.processes`: supervisors as children of this process: their output, signals, no orphan. `local`, `ssh` stand on it.
- `meshtrain.launch.slurm`, `kubernetes` (jobset, trainjob), `ray`, `sky`: one text each. `on_ray` is what a Ray job runs.

Engines allocate, queue and replace nodes; what a fault is and what to do about it the supervisors decide among themselves. Nothing
here loads JAX.
"""
