# Ends a test cluster: run by bash beside every process that starts one, and by `tests/cluster/down`.
#
#   reap.sh RUN LOCK hold KEEP    takes the lock, removes what an earlier run left, says `ready`, waits until its
#                                 standard input ends (its owner is done, or dead), and removes all
#   reap.sh RUN LOCK sweep 0      removes all if nobody holds the lock and it is not kept
#   reap.sh RUN LOCK down 0       removes all if nobody holds the lock, kept or not
#
# RUN is the cluster's folder: pids/ has a file for each process, `namespaces` and `cgroups` list what else was made.
set -u
shopt -s nullglob
run=$1 lock=$2 mode=$3 keep=$4

# named PID TEXT...: the process's command line has all the texts. Empty for one that has ended, waited for or not.
named() {
    local words=() text line
    mapfile -d '' -t words 2>/dev/null <"/proc/$1/cmdline" || return 1
    line="${words[*]}"
    for text in "${@:2}"; do [[ $line == *"$text"* ]] || return 1; done
}

# Of the processes that were noted, those that still run and still are what they were.
servers() {
    local file pid
    for file in "$run"/pids/*; do
        read -r pid <"$file" 2>/dev/null || continue
        named "$pid" "$run/" && echo "$pid"
    done
}

# What runs in the nodes' cgroups, and the processes that hold containers.
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
