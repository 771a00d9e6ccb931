# The images of the two daemons: one static binary each, no shell, no root.
#
#   docker build --target pgsource  -t holdfast/pgsource .
#   docker build --target kafkasink -t holdfast/kafkasink .
#
# For two architectures at once, with buildx and a registry to push to:
#
#   docker buildx build --platform linux/amd64,linux/arm64 --target pgsource -t …/pgsource --push .
#
# Nothing runs inside the images while they are built and Go compiles for another
# architecture by itself, so no emulation is needed. BuildKit is, for TARGETARCH.
#
# BINARIES=prebuilt takes the binaries that "make dist" made, for a machine whose
# engine reaches no registry. BASE is what the images stand on; nothing in them
# needs more than scratch (the roots for TLS are in the binaries), but
# a base with a shell helps when looking for a fault.
ARG BASE=scratch
ARG BINARIES=compiled
ARG GO_IMAGE=golang:1.26-bookworm

FROM --platform=$BUILDPLATFORM ${GO_IMAGE} AS compiled
ARG TARGETARCH
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY cmd cmd
COPY internal internal
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=linux GOARCH=$TARGETARCH go build -trimpath -buildvcs=false -o /out/ ./cmd/pgsource ./cmd/kafkasink

FROM scratch AS prebuilt
ARG TARGETARCH
COPY dist/linux-${TARGETARCH}/ /out/

FROM ${BINARIES} AS binaries

# An empty folder to copy from: a base without a shell cannot make one. A volume
# mounted on it for the first time gets its owner.
FROM scratch AS state
WORKDIR /var/lib/holdfast

FROM ${BASE} AS pgsource
COPY --from=binaries /out/pgsource /usr/local/bin/pgsource
COPY --from=state --chown=65532:65532 /var/lib/holdfast /var/lib/holdfast
# Inside a container the listener must be reachable from outside of it; publish
# the port on 127.0.0.1 unless others are to see it.
ENV PGSOURCE_LISTEN=0.0.0.0:8081
WORKDIR /var/lib/holdfast
VOLUME /var/lib/holdfast
EXPOSE 8081
USER 65532:65532
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["/usr/local/bin/pgsource", "healthcheck"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/pgsource"]

FROM ${BASE} AS kafkasink
COPY --from=binaries /out/kafkasink /usr/local/bin/kafkasink
COPY --from=state --chown=65532:65532 /var/lib/holdfast /var/lib/holdfast
ENV KAFKASINK_LISTEN=0.0.0.0:8082
WORKDIR /var/lib/holdfast
VOLUME /var/lib/holdfast
EXPOSE 8082
USER 65532:65532
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["/usr/local/bin/kafkasink", "healthcheck"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/kafkasink"]
