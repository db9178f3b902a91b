# Removes a test cluster: its processes, mounts, network namespaces, cgroups and directory. Every
# process that starts a cluster runs this beside it, and so does `tests/cluster/down`.
#
#   reap.sh RUN LOCK hold KEEP    takes the lock, removes the cluster of an earlier run and prints
#                                 `ready`. Waits until standard input ends, because its owner has
#                                 finished or died. Then removes the cluster; with KEEP=1, keeps it
#   reap.sh RUN LOCK sweep 0      removes the cluster, unless the lock is held or it is kept
#   reap.sh RUN LOCK down 0       removes the cluster, even if it is kept, unless the lock is held
#
# RUN is the cluster's directory. pids/ has a file for each process; the files `namespaces` and
# `cgroups` list network namespaces and cgroups.
set -u
shopt -s nullglob
run=$1 lock=$2 mode=$3 keep=$4

# Succeeds if the command line of a process contains all texts: command_contains PID TEXT...
# The command line of an exited process is empty, also that of a zombie.
command_contains() {
    local words=() text line
    mapfile -d '' -t words 2>/dev/null <"/proc/$1/cmdline" || return 1
    line="${words[*]}"
    for text in "${@:2}"; do [[ $line == *"$text"* ]] || return 1; done
}

# Prints the recorded processes that still run. The check of the command line excludes reused
# process IDs.
servers() {
    local file pid
    for file in "$run"/pids/*; do
        read -r pid <"$file" 2>/dev/null || continue
        command_contains "$pid" "$run/" && echo "$pid"
    done
}

# Prints the processes in the nodes' cgroups, and the shims of their containers.
containers() {
    local directory directories=() path
    [ -e "$run/cgroups" ] || return
    mapfile -t directories <"$run/cgroups"
    for directory in "${directories[@]}"; do
        find "$directory" -name cgroup.procs -exec cat {} + 2>/dev/null
    done | sort -u
    for path in /proc/[0-9]*; do
        command_contains "${path#/proc/}" containerd-shim "$run/" && echo "${path#/proc/}"
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
        done </proc/self/mounts | sort -r | while read -r path; do
            umount -l "$path" 2>/dev/null
        done
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
