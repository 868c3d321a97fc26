"""How well a model foresees text, names images, and does on others' tasks.

    documents ──windows──────────► rows ─┐                ┌─► perplexity          nats, bits per byte, per token and word
    tasks ─────harness───────────► rows ─┴─► scoring ─────┴─► answers             lm-evaluation-harness
                          └──────► prompts ─► generate.engine ─┘
    a run's held-out text ─────────────────► its eval loss again                  held_out
    images ────────────────────────────────► accuracy                             images

- `meshtrain.evaluate.scoring`: log-probabilities of given tokens, on any mesh; both stand on it.
- `meshtrain.evaluate.windows`: a document of any length as rows. `meshtrain.evaluate.perplexity`: what text costs a model.
- `meshtrain.evaluate.held_out`: the loss of a run's evaluations, of any checkpoint.
- `meshtrain.evaluate.images`: accuracy of a model of images, and its loss.
- `meshtrain.evaluate.harness`: a model as lm-evaluation-harness asks for one. `meshtrain.evaluate.tasks`: its tasks, run.
- `meshtrain.evaluate.progress`: how far it is, on stderr.
"""
