#!/usr/bin/env bash
# Runs the tests of rooms under ThreadSanitizer, or only builds them: tools/tsan.sh [--build] [ROOM...]; without rooms
# those of comm, launch, data, parallel and train. Needs a release build, whose torch it takes.
# torch itself is not instrumented: tools/tsan.supp names what it reports of torch's own threads.
# TRIREME_TSAN_RESULT=FILE also writes a summary there, as JSON.
set -euo pipefail
cd "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
root=$PWD
source tools/setup/common.sh
source tools/setup/packages.sh

build_only=0
if [[ ${1:-} == --build ]]; then
  build_only=1
  shift
fi
rooms=("$@")
((${#rooms[@]})) || rooms=(comm launch data parallel train)

# Whatever the tested rooms include, and nothing else: a build of everything takes three times as long.
rooms_below() {
  case " ${rooms[*]} " in
    *' parallel '* | *' train '*)
      echo 'base;text;plan;report;launch;kernels;comm;tensor;nn;data;optim;checkpoint;memory;precision;parallel;train' ;;
    *) echo 'base;text;plan;report;launch;kernels;comm;data' ;;
  esac
}

build() {
  local python torch
  require_packages sanitizers
  python=$(sed -n 's/^python=//p' build/release/trireme-settings)
  torch=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0])')
  cmake --preset tsan -DTRIREME_TORCH_DIR="$torch" -DTRIREME_INSTALL=OFF -DONLY_ROOMS="$(rooms_below)" >/dev/null
  # CMake lists tests by running their programs.
  TSAN_OPTIONS=report_bugs=0 cmake --build build/tsan -j "$(jobs_for_memory)" --target "${rooms[@]/#/test_}"
}

# run_room ROOM: one process. Left out are tests that measure time or take all cores, since everything takes ten times as long, one that
# leaves a process hardly any files to open, and one that forks beside the threads of a store, which it refuses.
run_room() {
  local symbolizer
  symbolizer=$(command -v addr2line)  # suppressions are names of functions; llvm-symbolizer would be another package
  TSAN_OPTIONS="suppressions=$root/tools/tsan.supp second_deadlock_stack=1 external_symbolizer_path=$symbolizer" OMP_NUM_THREADS=1 \
    "build/tsan/bin/test_$1" --gtest_filter='-*Cost*:*ALimitOfOpenFiles*:*ManyRanksMeet*:*Quick*:*AgentsStore*:*TwoHostsThatLoseEachOtherBothEnd*' >"build/tsan/$1.log" 2>&1
}

# say_room ROOM PASSED
say_room() {
  local log=$root/build/tsan/$1.log
  echo "ThreadSanitizer: $1"
  if $2; then
    grep '^\[  PASSED' "$log"
  else
    grep -E -A 40 'WARNING: ThreadSanitizer|: Failure$|^\[  FAILED' "$log" | head -n 200 || tail -n 100 "$log"
  fi
}

# result ROOM PASSED: a line of the summary.
result() {
  local tests reports
  tests=$(sed -n 's/^\[==========\] \([0-9]*\) tests\{0,1\} from .* ran.*/\1/p' "build/tsan/$1.log")
  reports=$(grep -c 'WARNING: ThreadSanitizer' "build/tsan/$1.log" || true)
  printf '{"room": "%s", "passed": %s, "tests": %s, "reports": %s}' "$1" "$2" "${tests:-0}" "$reports"
}

build
((build_only)) && exit 0
# Beside each other: most of their time they wait.
failed=0 lines=() processes=()
for room in "${rooms[@]}"; do
  run_room "$room" &
  processes+=($!)
done
for i in "${!rooms[@]}"; do
  room=${rooms[i]} passed=true
  wait "${processes[i]}" || { passed=false failed=1; }
  say_room "$room" "$passed"
  lines+=("$(result "$room" "$passed")")
done
if [[ -n ${TRIREME_TSAN_RESULT:-} ]]; then
  {
    printf '{"commit": "%s", "date": "%s", "rooms": [\n  ' "$(git rev-parse HEAD)" "$(date -u +%F)"
    (IFS=$'\n' && printf '%s' "${lines[0]}" && printf ',\n  %s' "${lines[@]:1}")
    printf '\n]}\n'
  } >"$TRIREME_TSAN_RESULT"
fi
exit "$failed"
