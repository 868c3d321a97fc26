"""Several runs on one described cluster: where each lies, how fast it is there, and why one has no place.

    python -m meshtrain.plan --jobs configs/jobs/llama.yaml --cluster h100

    JOBS.yaml ─► shapes: nodes x devices of a job ─► rules: first fit, best fit, balance ─► a packing ─► report, page,
     listed       requests: seconds, bytes by the plan        packing, searched                           kueue

- `meshtrain.plan.jobs.listed`: the file of jobs. `meshtrain.plan.jobs.requests`: the shapes that a job may take, and
  its speed where it lies.
- `meshtrain.plan.jobs.packing`: which nodes, jobs one after the other, and what comes of it.
- `meshtrain.plan.jobs.searched`: orders and shapes tried for a goal. `meshtrain.plan.jobs.kueue`: the same as Kueue's
  manifests.
"""
