# The stock trainer: launcher and examples in one program, with its libraries. Also contains
# libraries that programs sent with an experiment may need. Without a shell.
#
#   docker build --file images/trainer.Dockerfile --tag localhost/stoker-trainer:0.1.0 .

FROM rust:1.95.0-bookworm AS build
# Use the toolchain of this image: rust-toolchain.toml adds components that only checks need.
ENV RUSTUP_TOOLCHAIN=1.95.0
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --package stoker-examples && \
    python3 images/image.py rootfs target/release/stoker-trainer stoker-trainer \
        /etc/ssl/certs/ca-certificates.crt /rootfs \
        libdl.so.2 libm.so.6 libpthread.so.0 libresolv.so.2 librt.so.1 libstdc++.so.6

FROM scratch
COPY --from=build /rootfs/base/ /
COPY --from=build /rootfs/program/ /
USER 65532:65532
WORKDIR /
ENV PATH=/usr/local/bin:/usr/bin:/bin
ENTRYPOINT ["/usr/local/bin/stoker-trainer"]
