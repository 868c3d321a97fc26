"""Described machines: accelerators, links, and what a collective costs over them.

A description is a YAML file of a few lines; those of `meshtrain/cluster/known/` go by their names (`--cluster h100`),
and any path may be given in their place. A device's rates are its maker's, the share of them that training reaches is
fitted (`experiments/plan`).

    devices that talk ──► the levels of links that they cross ──► the cheapest algorithm's seconds
                topology.Group                       algorithms

A message costs its latency and its bytes over the bandwidth: the alpha-beta model (Thakur et al. 2005, section 3).

- `meshtrain.cluster.cluster`: nodes, links by level, failures. `meshtrain.cluster.levels`: levels found in measured
  messages.
- `meshtrain.cluster.accelerators`: peak rates and memory with their data sheets, and their efficiencies.
- `meshtrain.cluster.topology`: fat trees, rails, tori, dragonflies, hypercubes; which devices talk over which link.
- `meshtrain.cluster.algorithms`: rings, trees, butterflies and hierarchies, with their papers.
  `meshtrain.cluster.nccl`: GPUs.

`python -m meshtrain.plan --measure` writes such a file for the machine at hand.
"""
