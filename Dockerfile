# Two images of the server with its shipped bundle: `docker build .` for CPUs, `docker build --target gpu .` for NVIDIA
# GPUs. No instruction needs BuildKit, so that podman and buildah build them too.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# What is installed goes into /venv of a build stage, and from there into the image: pip and its traces stay behind.
FROM ${PYTHON_IMAGE} AS build
ENV PIP_CONSTRAINT=/build/constraints.txt \
    PIP_BUILD_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python -m venv --without-pip /venv
COPY constraints.txt pyproject.toml ./
RUN python -c "import tomllib; \
      project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      extras = project['optional-dependencies']; \
      [print(*project['dependencies'], *extras[name], sep='\n', file=open(name, 'w')) for name in ('cpu', 'gpu')]"

# The dependencies without the package, so that a change of its code installs none of them again; and without their own
# tests, a tenth of their size. Bytecode is compiled once and never compared with its source: nothing can be written later,
# and copies may change a file's time.
FROM build AS dependencies-cpu
RUN pip --python /venv/bin/python install --no-compile --requirement cpu \
    && find /venv -type d -name tests -prune -exec rm -r {} + \
    && python -m compileall -q --invalidation-mode unchecked-hash /venv

FROM build AS dependencies-gpu
RUN pip --python /venv/bin/python install --no-compile --requirement gpu \
    && find /venv -type d -name tests -prune -exec rm -r {} + \
    && python -m compileall -q --invalidation-mode unchecked-hash /venv

FROM build AS package
COPY . .
RUN pip --python /venv/bin/python install --no-compile --no-deps . \
    && python -m compileall -q --invalidation-mode unchecked-hash /venv

FROM ${PYTHON_IMAGE} AS server
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin offramp
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    OFFRAMP_HOST=0.0.0.0 \
    OFFRAMP_PORT=8000
EXPOSE 8000
USER 10001:10001
WORKDIR /
ENTRYPOINT ["offramp", "serve"]
# Asks where the settings say that the server listens (on Linux a connection to 0.0.0.0 is one to this machine); /readyz
# needs no key. A plain socket: importing http.client alone would take three times the CPU time of all this.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 CMD ["python", "-ISc", "\
import os, socket; \
server = socket.create_connection((os.environ['OFFRAMP_HOST'], os.environ['OFFRAMP_PORT']), timeout=2); \
server.sendall(b'GET /readyz HTTP/1.0\\r\\n\\r\\n'); \
raise SystemExit(b' 200 ' not in server.recv(32))"]
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Offramp" \
      org.opencontainers.image.description="Text classification that pays only for the depth each request needs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0 AND OFL-1.1"

FROM server AS gpu
# What NVIDIA's container runtime must hand in; CUDA and cuDNN themselves are in the image. Without a GPU the start fails,
# where the default `auto` would quietly go on with the CPU.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OFFRAMP_DEVICE=cuda
COPY --from=dependencies-gpu /venv /venv
COPY --from=package /venv /venv

FROM server AS cpu
COPY --from=dependencies-cpu /venv /venv
COPY --from=package /venv /venv
