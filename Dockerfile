# An image of meshtrain, for scripts/kubernetes.yaml and scripts/jobset.yaml:
#
#   docker build --build-arg DEVICES=cuda12 --tag registry.example.com/meshtrain:latest .
#
# DEVICES is cuda12, cuda13, tpu or cpu. `docker run --rm IMAGE train --config=tiny` tries it.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG DEVICES=cuda12

WORKDIR /opt/meshtrain
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY meshtrain meshtrain
COPY configs configs
ENV PIP_NO_CACHE_DIR=1
RUN pip install --constraint constraints.txt ".[${DEVICES},kubernetes]"

# A number, because Kubernetes' runAsNonRoot does not accept names. /runs is the mount point of a volume.
RUN useradd --uid 1000 --create-home meshtrain && install --directory --owner=meshtrain /runs
# The share of a GPU's memory that plans assume; JAX's default is 0.75.
ENV XLA_PYTHON_CLIENT_MEM_FRACTION=0.94
USER 1000
WORKDIR /home/meshtrain
ENTRYPOINT ["meshtrain"]
CMD ["--help"]
