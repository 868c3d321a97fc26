"""The notebooks' sources, and the frame that executes, checks and writes them: see `__main__`.

A source is a script `N_name.py` in jupytext's percent format: `# %%` begins a cell of code, `# %% [markdown]` one of
text, whose lines are comments; `# %% tags=["varies"]` one of code that may print anything, timings say. What a notebook
claims it asserts. Those of `source.KEPT` are committed with their outputs as `experiments/N_name.ipynb`, to be looked
at where nothing runs; `--write` builds the others.

`source.py` reads a source and says what it lacks; `notebook.py` makes the notebook of it and says what no reader should
find in its outputs; `compare.py` says whether two executions print the same; `execute.py` executes in a kernel, alone
with need of the extra `notebooks`. JupyterLab opens either file, and saves both (`experiments/jupytext.toml`).
"""
