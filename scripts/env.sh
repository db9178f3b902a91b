# Sets the directories of builds, data sets and tools, which are outside the clone. The other
# scripts source this file.

repo=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)
STOKER_CACHE="${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}"
export STOKER_CACHE
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$STOKER_CACHE/target}"
mkdir -p "$STOKER_CACHE"

# Fails with a remedy if a program is missing: need PROGRAM PACKAGE.
need() {
    command -v "$1" >/dev/null && return
    echo "error: $1 is not installed; install it (Debian: apt-get install $2)" \
        "and run this again" >&2
    exit 1
}
need cargo rustup
need cc gcc

# Clones share the build directory, but cargo distinguishes their files only by modification time.
# So delete another clone's builds of our crates, but keep its dependencies. Skip this under cargo:
# tests and xtask run scripts while they use programs in the build directory.
if [ -z "${CARGO_MANIFEST_DIR:-}" ] &&
    [ "$(cat "$CARGO_TARGET_DIR/clone" 2>/dev/null)" != "$repo" ]; then
    for profile in debug:dev release:release lints/debug:dev cuda/release:release; do
        directory="$CARGO_TARGET_DIR/${profile%:*}"
        if [ -d "$directory" ]; then
            (cd "$repo" && CARGO_TARGET_DIR=$(dirname "$directory") cargo clean --quiet \
                --profile "${profile#*:}" --workspace)
        fi
    done
    mkdir -p "$CARGO_TARGET_DIR"
    echo "$repo" >"$CARGO_TARGET_DIR/clone"
fi
