# Stops a test cluster. Bash runs this script beside every process that starts a cluster, and
# `tests/cluster/down` runs it too.
#
#   reap.sh RUN LOCK hold KEEP    takes the lock, removes what an earlier run left, prints `ready`,
#                                 waits for the end of its standard input (its owner has exited),
#                                 and removes everything unless KEEP is 1
#   reap.sh RUN LOCK sweep 0      removes everything if the lock is free and the cluster is not kept
#   reap.sh RUN LOCK down 0       removes everything if the lock is free, even if it is kept
#
# RUN is the directory of the cluster. pids/ has a file per process; `namespaces` and `cgroups` list
# the other objects.
set -u
shopt -s nullglob
run=$1 lock=$2 mode=$3 keep=$4

# named PID TEXT...: returns 0 if the command line of the process contains all texts. The command
# line of an ended process is empty, even if the process is still a zombie.
named() {
    local words=() text line
    mapfile -d '' -t words 2>/dev/null <"/proc/$1/cmdline" || return 1
    line="${words[*]}"
    for text in "${@:2}"; do [[ $line == *"$text"* ]] || return 1; done
}

# Prints the recorded processes that still run. Skips reused PIDs.
servers() {
    local file pid
    for file in "$run"/pids/*; do
        read -r pid <"$file" 2>/dev/null || continue
        named "$pid" "$run/" && echo "$pid"
    done
}

# Prints the processes in the cgroups of the nodes, and the shims of their containers.
containers() {
    local folder folders=() path
    [ -e "$run/cgroups" ] || return
    mapfile -t folders <"$run/cgroups"
    for folder in "${folders[@]}"; do
        find "$folder" -name cgroup.procs -exec cat {} + 2>/dev/null
    done | sort -u
    for path in /proc/[0-9]*; do
        named "${path#/proc/}" containerd-shim "$run/" && echo "${path#/proc/}"
    done
}

reap() {
    local pids path namespace try
    for try in {1..100}; do
        pids=$(servers; containers)
        [ -n "$pids" ] || break
        # shellcheck disable=SC2086
        kill -KILL $pids 2>/dev/null
        sleep 0.05
    done
    for try in 1 2; do
        while read -r _ path _; do
            [[ $path == "$run"/* ]] && echo "$path"
        done </proc/self/mounts | sort -r | while read -r path; do umount -l "$path" 2>/dev/null; done
    done
    [ ! -e "$run/namespaces" ] || while read -r namespace; do
        ip netns delete "$namespace" 2>/dev/null
    done <"$run/namespaces"
    [ ! -e "$run/cgroups" ] || while read -r path; do
        for try in {1..20}; do
            [ -d "$path" ] || break
            find "$path" -depth -type d -exec rmdir {} + 2>/dev/null
            [ ! -d "$path" ] || sleep 0.05
        done
    done <"$run/cgroups"
    rm -rf --one-file-system "$run"
}

case $mode in
hold)
    exec 9>>"$lock"
    if ! flock --nonblock 9; then
        echo waiting
        flock --timeout 1800 9 || { echo busy; exit 1; }
    fi
    if [ -e "$run/kept" ]; then
        [ -z "$(servers)" ] || { echo kept; exit 1; }
    fi
    [ ! -e "$run/pids" ] || reap
    mkdir -p "$run/pids" "$run/log"
    echo ready
    cat >/dev/null
    if [ "$keep" = 1 ]; then touch "$run/kept"; else reap; fi
    ;;
sweep | down)
    [ -d "$run" ] || exit 0
    exec 9>>"$lock"
    flock --nonblock 9 || { echo busy; exit 1; }
    [ "$mode" = down ] || [ ! -e "$run/kept" ] || exit 0
    reap
    ;;
esac
