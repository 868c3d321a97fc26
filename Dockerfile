# The image for `meshtrain launch jobset|trainjob|sky --image`, and for configs/serving/:
#   docker build --tag REGISTRY/meshtrain:TAG .
# CUDA's libraries come with jax[cuda12]; a node needs NVIDIA's driver and container toolkit alone.
FROM python:3.12-slim

ARG EXTRAS=cuda12,adopt,chat,remote,serve
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /opt/meshtrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY meshtrain ./meshtrain
COPY configs ./configs
# The versions that the tests last ran with.
RUN python -m pip install --constraint constraints.txt ".[${EXTRAS}]"

# Where launch mounts the volume that all nodes share; configs' paths begin there.
WORKDIR /work
