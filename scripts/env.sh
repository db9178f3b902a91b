# Where builds, data and tools lie: outside the clone, found again or made again. Sourced by the other scripts.

STOKER_CACHE="${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}"
export STOKER_CACHE
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$STOKER_CACHE/target}"
mkdir -p "$STOKER_CACHE"

# Fails with a remedy when a program is missing: need PROGRAM PACKAGE.
need() {
    command -v "$1" >/dev/null && return
    echo "error: $1 is not installed; install it (Debian: apt-get install $2) and run this again" >&2
    exit 1
}
need cargo rustup
need cc gcc
