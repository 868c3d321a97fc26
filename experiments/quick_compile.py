"""XLA flags with which a program for fake CPU devices compiles in a third of the time, and runs slower: for tests,
notebooks, faults.
"""

from importlib.metadata import version

FLAGS = ["--xla_backend_optimization_level=0"]
if (
    version("jaxlib") < "0.11"
):  # later versions know no other way, and end on a flag that they do not know
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
