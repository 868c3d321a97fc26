"""What runs of meshtrain take on a real GPU, beside what the planner and the compiler said of them: see `python -m
experiments.gpu --help`.
"""
