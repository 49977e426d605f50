# Two images of one source, without a model in them:
#   docker build --target cpu -t registry.example.com/outrider:0.1.0-cpu .
#   docker build --target cuda -t registry.example.com/outrider:0.1.0-cuda .
# Under Kubernetes k8s/ says how they run. One container with a Ray and a Redis of its own, and the demo model:
#   docker run --rm --init --shm-size 2g -p 127.0.0.1:8000:8000 -v "$PWD/demo_model:/models/demo_model:ro" IMAGE \
#     outrider serve --model /models/demo_model server.host=0.0.0.0 tenancy.anonymous=null server.require_key=false

# A tag may be another image tomorrow. To build on one that is known, ask for its digest where the registry can be reached
#   docker buildx imagetools inspect python:3.11.15-slim-bookworm --format '{{.Manifest.Digest}}'
# and add to the build --build-context python:3.11.15-slim-bookworm=docker-image://python@sha256:...
FROM python:3.11.15-slim-bookworm AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PATH=/opt/outrider/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1
# wget and grep are KubeRay's probes; openssl makes a pod's certificate; ps, top and pgrep are for who looks after a pod. A login
# shell sets PATH anew.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash grep openssl procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray \
    && useradd --uid 1000 --gid 1000 --create-home --home-dir /home/ray --shell /bin/bash ray \
    && echo "PATH=/opt/outrider/bin:\$PATH" > /etc/profile.d/outrider.sh

# What Outrider needs, in layers that a change of its source leaves as they are: gigabytes are pulled and pushed once.
FROM base AS environment
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/outrider \
    && /opt/outrider/bin/pip install -c constraints.txt pip setuptools
# requirements.txt, and a file for each extra: what pyproject.toml names, one on a line. Beside them matplotlib, for outrider bench.
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    lists = {"requirements": project["dependencies"], **project["optional-dependencies"]}; \
    [open(name + ".txt", "w").write("\n".join(lines)) for name, lines in lists.items()]'

FROM environment AS cpu-environment
# An index with CPU builds; the default one has torch for CUDA, with gigabytes of its libraries.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --index-url "$TORCH_INDEX_URL" -c constraints.txt torch \
    && pip install -c constraints.txt -r requirements.txt -r tracing.txt matplotlib

# The default index's torch is built for CUDA 13: nodes need an NVIDIA driver of 580 or newer.
FROM environment AS cuda-environment
# The address of a wheel of flash-attn for this Python, torch and CUDA: there is no nvcc here to make one.
ARG FLASH_ATTN=
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt -r requirements.txt -r gpu.txt -r tracing.txt matplotlib \
    && if [ -n "$FLASH_ATTN" ]; then pip install -c constraints.txt "$FLASH_ATTN"; fi

FROM base AS runtime
LABEL org.opencontainers.image.title="Outrider" \
      org.opencontainers.image.description="An OpenAI-compatible server on Ray Serve with draft-free speculative decoding" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11.15-slim-bookworm"
WORKDIR /home/ray
EXPOSE 8000 8001
CMD ["outrider", "--help"]

FROM runtime AS cpu
COPY --from=cpu-environment /opt/outrider /opt/outrider
COPY . /opt/outrider/src
RUN pip install --no-deps --no-index --no-build-isolation --no-cache-dir -e /opt/outrider/src \
    && python -m compileall -q /opt/outrider/src \
    && pip check
USER 1000:1000

FROM runtime AS cuda
# The driver's libraries and nvidia-smi. Which devices are seen is not said here: a pod without GPUs would see all of its node.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# With gcc Triton makes the little programs that launch its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-environment /opt/outrider /opt/outrider
COPY . /opt/outrider/src
RUN pip install --no-deps --no-index --no-build-isolation --no-cache-dir -e /opt/outrider/src \
    && python -m compileall -q /opt/outrider/src \
    && pip check
USER 1000:1000
