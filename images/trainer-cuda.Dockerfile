# The stock trainer for NVIDIA GPUs. burn compiles its kernels at run time with an LLVM in the
# program. It needs CUDA's mathematical functions (libdevice), cuBLAS, NCCL, and the driver, which
# the node's container runtime mounts.
#
#   docker build --file images/trainer-cuda.Dockerfile --tag localhost/stoker-trainer:0.1.0-cuda .

ARG CUDA=12.8.1

FROM rust:1.95.0-bookworm AS rust

FROM nvidia/cuda:${CUDA}-devel-ubuntu22.04 AS build
COPY --from=rust /usr/local/rustup /usr/local/rustup
COPY --from=rust /usr/local/cargo /usr/local/cargo
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo
ENV PATH=/usr/local/cargo/bin:/usr/local/cuda/bin:$PATH
ENV RUSTUP_TOOLCHAIN=1.95.0
WORKDIR /src
COPY . .
# The build downloads LLVM. A feature of cudarc selects the version of CUDA, not the image.
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --package stoker-examples --features cuda && \
    install -D target/release/stoker-trainer /out/stoker-trainer && \
    strip --strip-debug /out/stoker-trainer
# The directory is named after the architecture, amd64 or arm64.
RUN cp --dereference /usr/lib/*-linux-gnu/libnccl.so.2 /out/libnccl.so.2
RUN cp --dereference /usr/local/cuda/lib64/libcublasLt.so.12 /out/libcublasLt.so.12

FROM nvidia/cuda:${CUDA}-base-ubuntu22.04
RUN apt-get update && \
    apt-get install --yes --no-install-recommends ca-certificates && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 65532 stoker && \
    useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin stoker
COPY --from=build /usr/local/cuda/nvvm/libdevice/ /usr/local/cuda/nvvm/libdevice/
COPY --from=build /out/libnccl.so.2 /usr/lib/libnccl.so.2
COPY --from=build /out/libcublasLt.so.12 /usr/lib/libcublasLt.so.12
COPY --from=build /out/stoker-trainer /usr/local/bin/stoker-trainer
# The base image shows all GPUs of a node to every container. Device plugins and `docker run --gpus`
# set the variable to the GPUs of the container.
ENV NVIDIA_VISIBLE_DEVICES=void NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
WORKDIR /
ENTRYPOINT ["/usr/local/bin/stoker-trainer"]
