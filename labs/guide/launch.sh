#!/usr/bin/env bash
# Starts the ranks of 'trireme train' by a launcher other than its own:
#
#   labs/guide/launch.sh HOW [arguments of 'trireme train'; default: configs/quickstart.yaml]
#
#   torchrun   one agent of PyTorch's launcher
#   agents     two of them that meet, each with half of the ranks, as on two hosts
#   srun       tasks of Slurm
#   mpirun     processes of Open MPI
#   hand       no launcher: the five variables, and a process for each rank
#   hosts      two hosts of one CPU rank each on this machine: they see neither each other's processes nor memory, and
#              have one wire. Needs root, or namespaces for users
#
# RANKS is how many (2), TRIREME the command (build/release/bin/trireme). Ends with the exit code of a rank that failed;
# with 3 where the launcher is not here. Real hosts: docs/guide/many_hosts.md.
set -euo pipefail
root=$(cd "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../.." && pwd)
ranks=${RANKS:-2}
trireme=${TRIREME:-$root/build/release/bin/trireme}

say() { echo "launch.sh: $*" >&2; }

missing() {
  say "$1 is not installed; $2"
  exit 3
}

needs() { command -v "$1" >/dev/null || missing "$1" "$2"; }

# A port of this machine that nobody listens at.
free_port() {
  local port
  while port=$((20000 + RANDOM % 10000)); (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
  echo "$port"
}

# Waits for these processes; ends with the first exit code that is not 0.
wait_for() {
  local code=0 pid
  for pid; do
    wait "$pid" || code=$((code ? code : $?))
  done
  exit "$code"
}

by_torchrun() {
  needs torchrun "it comes with PyTorch: pip install torch"
  exec torchrun --no-python --standalone --nproc_per_node "$ranks" "$trireme" train "$@"
}

by_agents() {
  needs torchrun "it comes with PyTorch: pip install torch"
  local port node
  local -a pids=()
  ((ranks % 2 == 0)) || { say "RANKS is $ranks; two agents take an even number"; exit 2; }
  port=$(free_port)
  for node in 0 1; do
    torchrun --no-python --nnodes 2 --node_rank "$node" --nproc_per_node $((ranks / 2)) --master_addr 127.0.0.1 \
      --master_port "$port" "$trireme" train "$@" &
    pids+=($!)
  done
  wait_for "${pids[@]}"
}

by_srun() {
  needs srun "it comes with Slurm; on a cluster run this within a job (salloc, sbatch)"
  exec srun --nodes=1 --ntasks="$ranks" "$trireme" train "$@"
}

by_mpirun() {
  needs mpirun "Debian and Ubuntu have it in openmpi-bin"
  local -a options=(--oversubscribe)
  ((EUID)) || options+=(--allow-run-as-root)
  exec mpirun -n "$ranks" "${options[@]}" "$trireme" train "$@"
}

by_hand() {
  local rank
  local -a pids=()
  export MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-$(free_port)} WORLD_SIZE=$ranks
  for ((rank = 0; rank < ranks; ++rank)); do
    RANK=$rank LOCAL_RANK=$rank "$trireme" train "$@" &
    pids+=($!)
  done
  wait_for "${pids[@]}"
}

# in_host NAME ADDRESS RANK NETWORK ARGUMENTS...: one rank with processes, memory and name of its own.
in_host() {
  local name=$1 address=$2 rank=$3 network=$4
  shift 4
  # shellcheck disable=SC2016  # it is the inner shell that expands them
  nsenter --net="$network" unshare --pid --fork --kill-child --mount-proc --ipc --uts sh -euc \
    'ip addr add "$2/24" dev "wire-$1"; ip link set "wire-$1" up; ip link set lo up; hostname "host-$1"; shift 2; exec "$@"' \
    sh "$name" "$address" env MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK="$rank" LOCAL_RANK=0 \
    LOCAL_WORLD_SIZE=1 "$trireme" train --device=cpu "$@"
}

# In namespaces that end with this process, and the wire with them.
on_wired_hosts() {
  local deadline=$((SECONDS + 60))
  local -a pids
  unshare --net sleep infinity &
  holder=$!
  trap 'kill "$holder"' EXIT
  while [[ $(readlink "/proc/$holder/ns/net") == "$(readlink /proc/$$/ns/net)" ]]; do
    ((SECONDS < deadline)) || { say "the network of the second host did not come up within a minute"; exit 3; }
    sleep 0.01
  done
  ip link add wire-a type veth peer name wire-b netns "$holder" || missing "veth" "it is a module of the kernel"
  in_host a 10.77.0.1 0 "/proc/$$/ns/net" "$@" &
  pids=($!)
  in_host b 10.77.0.2 1 "/proc/$holder/ns/net" "$@" &
  pids+=($!)
  wait_for "${pids[@]}"
}

by_hosts() {
  local -a spaces=(unshare --net --mount)
  ((EUID == 0)) || spaces+=(--user --map-root-user)
  needs ip "Debian and Ubuntu have it in iproute2"
  needs nsenter "Debian and Ubuntu have it in util-linux"
  "${spaces[@]}" unshare --pid --fork --mount-proc --ipc --uts true 2>/dev/null ||
    missing "a way to make namespaces" "run this as root, and outside of a container that forbids it"
  exec "${spaces[@]}" "${BASH_SOURCE[0]}" wired "$@"
}

(($# > 0)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
how=$1
shift
[[ -x $trireme || $how == --help ]] || { say "there is no $trireme; build it with ./trireme.sh --build-only, or set TRIREME"; exit 3; }
(($#)) || set -- "$root/configs/quickstart.yaml"
case $how in
torchrun | agents | srun | mpirun | hand | hosts) "by_$how" "$@" ;;
wired) on_wired_hosts "$@" ;;
*)
  say "'$how' is none of torchrun, agents, srun, mpirun, hand, hosts"
  exit 2
  ;;
esac
