"""Reinforcement learning with verifiable rewards, on the trainer's own mesh."""
