# Words and locks of ./trireme.sh. Everything it says goes to stderr: stdout belongs to the command it runs.
# shellcheck shell=bash

say() { printf 'trireme.sh: %s\n' "$*" >&2; }

# die CODE TEXT...: the exit codes are those of trireme itself (2 usage, 3 environment).
die() {
  local code=$1
  shift
  say "$@"
  exit "$code"
}

# hold_lock FILE DOING: waits while another call holds it; released by release_lock or when this process ends.
hold_lock() {
  mkdir -p "${1%/*}" || die 3 "cannot create ${1%/*}. Fix: make it writable, or set XDG_CACHE_HOME to a writable folder."
  exec {lock_fd}>"$1"
  if ! flock -n "$lock_fd"; then
    say "another ./trireme.sh is $2; waiting"
    flock "$lock_fd"
  fi
}

release_lock() { exec {lock_fd}>&-; }

# jobs_for_memory: one compiler a core, 1.5 GB each, never less than one.
jobs_for_memory() {
  local cores key value _ available=0 limit
  cores=$(nproc)
  while read -r key value _; do
    [[ $key == MemAvailable: ]] && available=$((value / 1024))
  done </proc/meminfo
  if [[ -r /sys/fs/cgroup/memory.max ]] && read -r limit </sys/fs/cgroup/memory.max && [[ $limit != max ]]; then
    ((limit / 1048576 < available)) && available=$((limit / 1048576))
  fi
  local jobs=$((available / 1536))
  ((jobs > cores)) && jobs=$cores
  ((jobs < 1)) && jobs=1
  echo "$jobs"
}
