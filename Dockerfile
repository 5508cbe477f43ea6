# One image for all three processes; the command says which: frontend, scheduler, worker, or serve for all.
#
#   docker build -t penstock .
#
# torch: the build for CPUs, which is small; `--build-arg TORCH_BACKEND=cuda` takes the one for GPUs (compose.gpu.yaml
# does). TORCH_INDEX_URL names another index for torch alone; a wheel in the folder wheels/ comes before all of them.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ARG TORCH_BACKEND=cpu
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH
# The libraries first: they change less often than the source. The star lets wheels/ be absent.
COPY pyproject.toml constraints.txt deploy/install-torch.sh wheels* /build/wheels/
RUN set -e; cd /build/wheels; \
    if ls torch-*.whl >/dev/null 2>&1; then pip install --find-links . -c constraints.txt torch-*.whl; \
    else ./install-torch.sh "$(command -v python)" -c constraints.txt; fi; \
    pip uninstall -q -y uv
RUN python -c "import pathlib, tomllib; project = tomllib.loads(pathlib.Path('/build/wheels/pyproject.toml').read_text())['project']; print(*project['dependencies'], *project['optional-dependencies']['otel'], *project['optional-dependencies']['images'], sep='\n')" > /build/requirements.txt \
    && pip install --find-links /build/wheels -c /build/wheels/constraints.txt -r /build/requirements.txt
# For the CPU kernels; without it a worker on a CPU takes torch's, which are slower.
RUN apt-get update && apt-get install -y --no-install-recommends g++ || echo "no C++ compiler could be installed"
COPY . /build/source/
RUN CXX=none pip install --find-links /build/wheels -c /build/source/constraints.txt --no-deps /build/source \
    && cd / && (python -m penstock.kernels.native.build --portable || true)

FROM ${BASE_IMAGE}
# For a GPU: Triton compiles a small launcher at run time, so give EXTRA_PACKAGES="gcc libc6-dev".
ARG EXTRA_PACKAGES=""
RUN if [ -n "$EXTRA_PACKAGES" ]; then apt-get update && apt-get install -y --no-install-recommends $EXTRA_PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock \
    && install -d -o penstock -m 700 /keys /cache /kv
COPY --from=build /opt/penstock /opt/penstock
# Mount a volume at /cache, and a model that is named is downloaded once.
ENV PATH=/opt/penstock/bin:$PATH HOME=/tmp HF_HOME=/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER penstock
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["penstock"]
# `docker run -p 8000:8000` opens the port to the whole network, so this wants API keys or PENSTOCK_INSECURE_BIND=true.
CMD ["serve", "--host", "0.0.0.0"]
