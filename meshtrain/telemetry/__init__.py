"""What a person sees of a run while it goes on.

    step 75/150  loss 2.1181  4,582 tokens/s  27 s left

`meshtrain.telemetry.progress` shows a bar on a terminal and such lines elsewhere. A reader that goes away ends no run. The same
numbers for programs, in full precision: `meshtrain.run.rows`.
"""
