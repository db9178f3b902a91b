# The command line `stoker`, for the web page of a cluster: one program, its libraries and the CA
# certificates. Without a shell.
#
#   docker build --file images/stoker.Dockerfile --tag localhost/stoker:0.1.0 .

FROM rust:1.95.0-bookworm AS build
# Use the toolchain of this image: rust-toolchain.toml adds components that only checks need.
ENV RUSTUP_TOOLCHAIN=1.95.0
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --package stoker-cli && \
    python3 images/image.py rootfs target/release/stoker stoker \
        /etc/ssl/certs/ca-certificates.crt /rootfs

FROM scratch
COPY --from=build /rootfs/base/ /
COPY --from=build /rootfs/program/ /
USER 65532:65532
WORKDIR /
ENV PATH=/usr/local/bin:/usr/bin:/bin
ENTRYPOINT ["/usr/local/bin/stoker"]
