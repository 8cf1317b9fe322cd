# One image for all three services; the command says which one runs (deploy/, or `epilora serve` for all on one host).
#
#   docker build -t epilora:0.1.0 .

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/epilora
WORKDIR /src
COPY constraints.txt ./
# torch alone first: it is most of the image and changes least.
RUN /opt/epilora/bin/pip install --constraint constraints.txt "torch==$(sed -n 's/^torch==//p' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY epilora epilora
COPY loader_service loader_service
COPY compute_worker compute_worker
COPY gateway gateway
RUN /opt/epilora/bin/pip install --constraint constraints.txt .

FROM python:3.11-slim-bookworm
# Triton compiles its launchers with the C compiler it finds.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 epilora \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin epilora
COPY --from=build /opt/epilora /opt/epilora
ENV PATH=/opt/epilora/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 50051 9400
ENTRYPOINT ["/opt/epilora/bin/epilora"]
CMD ["--help"]
