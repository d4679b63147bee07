# The command `jaxrl` in a container.
#
#   docker build -t jaxrl .                                  # CPU
#   docker build -t jaxrl --build-arg EXTRAS='[cuda]' .      # NVIDIA GPUs, with jax's CUDA libraries
#   docker run --gpus all --ipc=host -v "$PWD/runs:/home/jaxrl/runs" jaxrl train --config=ppo
#
# EXTRAS takes any extras of pyproject.toml: '[cuda,serve,math]'. BUILD.md says what a GPU needs.
FROM python:3.12-slim

# A comma-separated list in brackets, or nothing.
ARG EXTRAS=""

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxrl_llm jaxrl_llm
COPY models models
COPY configs configs
RUN pip install --no-cache-dir ".${EXTRAS}" -c constraints.txt

# What the NVIDIA container toolkit puts into the container; without GPUs it has no effect.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN useradd --create-home jaxrl
USER jaxrl
WORKDIR /home/jaxrl
ENTRYPOINT ["jaxrl"]
CMD ["--help"]
