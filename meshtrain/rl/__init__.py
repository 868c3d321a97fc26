"""Reinforcement learning with verifiable rewards on the trainer's own mesh: GRPO and its kin (`train.objective: grpo`).

    prompts ──► answers of a group ──► rewards ──► advantages ──► packed rows ──► optimizer steps ──┐
                      ▲                                                                             │
                      └───────────────────────── the weights, laid out for decoding ◄───────────────┘

- `meshtrain.rl.rewards`: scores answers in child processes, without JAX; `keeper` is the program of a child.
- `meshtrain.rl.rollouts`: draws the answers on the mesh that trains.
- `meshtrain.rl.advantages`: compares the answers of a group with each other.
"""
