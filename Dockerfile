# One image for prefill nodes, decode nodes and proxies: `docker build --tag tandem .`
#
# BASE: any image with Python 3.11 or newer and its venv, and with g++ or apt-get. PyTorch's wheels
# bring CUDA's libraries along, so for GPUs it is enough to build with
# TORCH_INDEX=https://pypi.org/simple.
# PACKAGES: more to install; KubeRay needs EXTRAS=hub,nixl,otel,ray and PACKAGES='ray[default,serve]'.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hub,nixl,otel
ARG PACKAGES=
ENV PATH=/opt/tandem/bin:$PATH PIP_NO_CACHE_DIR=1
# For the native kernels; the image itself needs no compiler.
RUN command -v g++ \
    || (apt-get update && apt-get install --yes --no-install-recommends g++)
RUN python3 -m venv /opt/tandem
WORKDIR /src
COPY constraints.txt ./
# The largest layer is the first, so that a change of the project leaves it as it is.
RUN pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md ./
COPY engine engine
COPY serving serving
COPY connector connector
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY proxy proxy
COPY deploy deploy
RUN pip install --constraint constraints.txt ".[${EXTRAS}]" ${PACKAGES}

FROM ${BASE}
COPY --from=build /opt/tandem /opt/tandem
# Caches of the model's digest and of hub names: the one folder beside /tmp that is written to.
ENV PATH=/opt/tandem/bin:$PATH XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /cache tandem
WORKDIR /cache
USER 10001:10001
# No health check: orchestrators ask GET /ready and GET /live.
ENTRYPOINT ["tandem"]
