# docker build -t moco .                                         (CPU)
# docker build -t moco --build-arg BASE=nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04 .   (CUDA, run with --gpus all)
# The README's two commands: docker run --rm moco · docker run --rm moco make test
ARG BASE=python:3.12-slim
FROM ${BASE}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /moco
# Another build of PyTorch: --build-arg TORCH="torch torchvision --index-url …", as for make
ARG TORCH="torch torchvision"
ENV PATH=/moco/.venv/bin:${PATH}
COPY Makefile pyproject.toml README.md LICENSE ./
COPY src ./src
RUN make .venv/.installed TORCH="${TORCH}"
COPY . .

CMD ["make", "demo"]
