"""Measures models: perplexity of text, accuracy on images, and the tasks of lm-evaluation-harness.

    documents ──rows_of──► rows ─┐                ┌─► perplexity          nats, bits per byte, per token and word
    tasks ─────harness───► rows ─┴─► scoring ─────┴─► answers             lm-evaluation-harness
                      └──► prompts ─► generate.engine ─┘
    a run's validation data, text or images ────────► its eval loss, accuracy

- `meshtrain.evaluate.scoring`: log-probabilities of given tokens, on any mesh. `meshtrain.evaluate.perplexity`: of
  text, in rows.
- `meshtrain.evaluate.evaluation`: evaluations while a run goes on: when, and what follows.
- `meshtrain.evaluate.validation`: the loss of a run's evaluations, and accuracy on images, of any checkpoint.
- `meshtrain.evaluate.harness`: a model as lm-evaluation-harness asks for one, and its tasks. Progress is shown on
  stderr (`meshtrain.telemetry.progress`).
"""

USUAL = 1024  # tokens of a row of text, where the model takes as many
