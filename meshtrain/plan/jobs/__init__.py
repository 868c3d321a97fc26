"""Several runs on one described cluster: where each lies, how fast it is there, and why one has no place.

    python -m meshtrain.plan --jobs configs/jobs/llama.yaml --cluster h100

    JOBS.yaml ──► ways: nodes x devices of each job ──► rules: first fit, best fit, balance ──► a placement ──► report, page, kueue
     listed         seconds and bytes by the plan         packing, searched                       its figures

- `meshtrain.plan.jobs.listed`: the file of jobs. `meshtrain.plan.jobs.ways`: what a job may take, and its speed where it lies.
- `meshtrain.plan.jobs.rules`: which nodes. `meshtrain.plan.jobs.packing`: jobs one after the other, and what comes of it.
- `meshtrain.plan.jobs.searched`: orders and ways tried for a goal. `meshtrain.plan.jobs.kueue`: the same as Kueue's manifests.
"""
