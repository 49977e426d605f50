# Two images of one source, without a model in them, and one of a model alone, for who keeps models in a registry:
#   docker build --target cpu -t registry.example.com/outrider:0.1.0-cpu .
#   docker build --target cuda -t registry.example.com/outrider:0.1.0-cuda .
#   docker build --target weights --build-context model=DIR -t registry.example.com/MODEL .
# Under Kubernetes k8s/ says how they run. One container with a Ray and a Redis of its own, and the demo model:
#   docker run --rm --init --shm-size 2g -p 127.0.0.1:8000:8000 -v "$PWD/demo_model:/models/demo_model:ro" IMAGE \
#     outrider serve --model /models/demo_model server.host=0.0.0.0 tenancy.anonymous=null server.require_key=false

# A digest names one image for ever, a tag does not. For another base, ask the registry for its digest:
#   docker buildx imagetools inspect python:3.11.15-slim-bookworm --format '{{.Manifest.Digest}}'
FROM python:3.11.15-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3 AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PATH=/opt/outrider/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1
# wget and grep are KubeRay's probes; openssl makes a pod's certificate; ps, top and pgrep are for who looks after a pod. With gcc
# Triton makes the little programs that launch its kernels, with g++ DeepSpeed its sums of ranks on processors. A login shell sets
# PATH anew.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash g++ gcc grep libc6-dev openssl procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray \
    && useradd --uid 1000 --gid 1000 --create-home --home-dir /home/ray --shell /bin/bash ray \
    && echo "PATH=/opt/outrider/bin:\$PATH" > /etc/profile.d/outrider.sh

# What Outrider needs, in layers that a change of its source leaves as they are: gigabytes are pulled and pushed once.
FROM base AS environment
WORKDIR /src
COPY constraints-hashed.txt constraints-cuda-hashed.txt pyproject.toml ./
# Every file that pip takes has a hash in these two lists. The pip that comes with Python does not read hashes of constraints: it
# installs the pip of the list, and the setuptools.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/outrider \
    && awk '/^(pip|setuptools)==/ { wanted = 1 } wanted { print } !/\\$/ { wanted = 0 }' constraints-hashed.txt > pip.txt \
    && /opt/outrider/bin/pip install --require-hashes --no-deps -r pip.txt
# requirements.txt, and a file for each extra: what pyproject.toml names, one on a line. Beside them matplotlib, for outrider bench.
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    lists = {"requirements": project["dependencies"], **project["optional-dependencies"]}; \
    [open(name + ".txt", "w").write("\n".join(lines)) for name, lines in lists.items()]'

FROM environment AS cpu-environment
# An index with CPU builds; the default one has torch for CUDA, with gigabytes of its libraries.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# Of the index's file for Python 3.11 on x86-64.
ARG TORCH_SHA256=6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
# DeepSpeed is built from its source, which asks for the torch that is installed.
RUN --mount=type=cache,target=/root/.cache/pip \
    grep -m 1 -o '^torch==[0-9.]*' constraints-cuda-hashed.txt > torch.txt \
    && sed -i "s/$/ --hash=sha256:$TORCH_SHA256/" torch.txt \
    && pip install --require-hashes --no-deps --index-url "$TORCH_INDEX_URL" -r torch.txt \
    && pip install --require-hashes -c constraints-hashed.txt -r requirements.txt -r tracing.txt matplotlib \
    && pip install --require-hashes -c constraints-hashed.txt --no-build-isolation -r baselines.txt

# The default index's torch is built for CUDA 13: nodes need an NVIDIA driver of 580 or newer. --build-arg CUDA=cu126 takes the same
# torch built for CUDA 12.6, which runs on any driver from 525 on. Its libraries have no hashes here: only their versions are checked.
FROM environment AS cuda-environment
ARG CUDA=cu130
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/$CUDA
RUN --mount=type=cache,target=/root/.cache/pip \
    export PIP_REQUIRE_HASHES=1 PIP_CONSTRAINT="constraints-hashed.txt constraints-cuda-hashed.txt" \
    && if [ "$CUDA" != cu130 ]; then export PIP_REQUIRE_HASHES=0 PIP_CONSTRAINT=constraints-hashed.txt \
    && pip install --no-deps --index-url "$TORCH_INDEX_URL" "$(grep -o '^torch==[0-9.]*' constraints-cuda-hashed.txt)"; fi \
    && pip install -r requirements.txt -r gpu.txt -r tracing.txt matplotlib \
    && pip install --no-build-isolation -r baselines.txt

# A wheel of flash-attn for this Python, torch and CUDA: minutes on many cores, hours on few. MAX_JOBS compilers run at once, each
# takes some gigabytes. --build-arg FLASH_ATTN=none leaves it out (prompts go by torch's flash kernels then), and an address of a
# wheel takes that one, which has to end with #sha256= and its hash. Every kernel is compiled once for each of FLASH_ATTN_CUDA_ARCHS: 80 is A100, 90 is H100 and H200, and code
# for one does not run on the other. One of them alone is half the work. nvcc.txt is CUDA 13's compiler: with another CUDA nothing
# is compiled.
FROM cuda-environment AS flash-attn
ARG CUDA=cu130
ARG FLASH_ATTN=flash-attn==2.8.3.post2
ARG FLASH_ATTN_CUDA_ARCHS=80;90
ARG MAX_JOBS=4
WORKDIR /wheels
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$FLASH_ATTN" != none ] && { [ "$CUDA" = cu130 ] || [ "${FLASH_ATTN#*://}" != "$FLASH_ATTN" ]; }; then \
    export PIP_REQUIRE_HASHES=1 PIP_CONSTRAINT="/src/constraints-hashed.txt /src/constraints-cuda-hashed.txt" \
    && pip install -r /src/nvcc.txt \
    && home=$(python -c 'import nvidia.cu13; print(*nvidia.cu13.__path__)') \
    && ln -sf libcudart.so.13 "$home/lib/libcudart.so" \
    && ln -sfn lib "$home/lib64" \
    && CUDA_HOME=$home FLASH_ATTENTION_FORCE_BUILD=TRUE pip wheel --no-deps --no-build-isolation -w /wheels "$FLASH_ATTN"; fi

FROM scratch AS weights
# The folder of a model, as a volume of type image: one layer that nodes pull once, whatever becomes of the server's image.
# hadolint ignore=DL3022
COPY --from=model . /model

FROM base AS runtime
LABEL org.opencontainers.image.title="Outrider" \
      org.opencontainers.image.description="An OpenAI-compatible server on Ray Serve with draft-free speculative decoding" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11.15-slim-bookworm" \
      org.opencontainers.image.base.digest="sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3"
WORKDIR /home/ray
EXPOSE 8000 8001
CMD ["outrider", "--help"]

FROM runtime AS cpu
COPY --from=cpu-environment /opt/outrider /opt/outrider
COPY . /opt/outrider/src
# Loops over arrays are compiled here, for the kinds of processors that this one is: a pod has a home of its own, which is empty.
RUN pip install --no-deps --no-index --no-build-isolation --no-cache-dir -e /opt/outrider/src \
    && python -m compileall -q /opt/outrider/src \
    && pip check \
    && python -m outrider.cluster.cli.launch.compile_ahead --image
USER 1000:1000

FROM runtime AS cuda
# The driver's libraries and nvidia-smi. Which devices are seen is not said here: a pod without GPUs would see all of its node.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-environment /opt/outrider /opt/outrider
RUN --mount=type=bind,from=flash-attn,source=/wheels,target=/wheels \
    find /wheels -name '*.whl' -exec pip install --no-deps --no-index --no-cache-dir {} +
COPY . /opt/outrider/src
RUN pip install --no-deps --no-index --no-build-isolation --no-cache-dir -e /opt/outrider/src \
    && python -m compileall -q /opt/outrider/src \
    && pip check \
    && python -m outrider.cluster.cli.launch.compile_ahead --image
USER 1000:1000
