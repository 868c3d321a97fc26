"""Why a run is slow, in words: what its files tell, held against rules and the plan.

    metrics.jsonl  resources/  traces/  config.yaml ──diagnose.read──► Evidence ──rules, layouts──► findings, sorted
                                                                          ▲
                                                            plan of the config on its cluster

The most severe finding comes first.

`rules` has one function a reason, `layouts` those that the planner must confirm; `tracing` takes the trace of a run
that has none, from a short training beside it. `python -m experiments.watch.slowdowns` makes eight slowdowns on
purpose, and compares the findings with them.
"""
