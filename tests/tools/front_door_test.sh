#!/usr/bin/env bash
# trireme.sh over a project of three small programs and an imitation of libtorch: what it builds, when it does not,
# where it runs, and what it says when something is missing. Needs no network. Usage: front_door_test.sh SCRATCH
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch="${1:?usage: front_door_test.sh SCRATCH}/a path with spaces"
project=$scratch/project
elsewhere=$scratch/elsewhere
failures=0 checks=0

# expect NAME CODE PATTERN COMMAND...: exit code, and stdout and stderr together matching an extended regex.
expect() {
  local name=$1 code=$2 pattern=$3 output actual=0
  shift 3
  output=$("$@" 2>&1) || actual=$?
  checks=$((checks + 1))
  if [[ $actual != "$code" || ! $output =~ $pattern ]]; then
    failures=$((failures + 1))
    printf 'FAILED %s: exit code %s (expected %s), expected /%s/ in:\n%s\n' "$name" "$actual" "$code" "$pattern" "$output"
  fi
}

# make_torch SITE VERSION: what trireme.sh looks at in site-packages.
make_torch() {
  mkdir -p "$1"/torch/{lib,include/ATen} "$1"/numpy "$1"/nvidia/{cu13/lib,nccl/lib,cudnn}
  echo "__version__ = '$2'" >"$1/torch/version.py"
  touch "$1"/torch/lib/libtorch_{cpu,cuda}.so "$1/torch/include/ATen/ATen.h" "$1/numpy/__init__.py" \
    "$1/torch/__init__.py" "$1/nvidia/cu13/lib/libcudart.so.13" "$1/nvidia/nccl/lib/libnccl.so.2"
}

make_project() {
  mkdir -p "$project"/{trireme,tests,cmake,tools} "$elsewhere"
  cp -r "$repository/trireme.sh" "$repository/CMakePresets.json" "$project"
  cp -r "$repository"/tools/{setup,packages.txt} "$repository"/tools/requirements-*.txt "$project/tools"
  printf 'int main() {}\n' | tee "$project/trireme/worker.cpp" >"$project/tests/law.cpp"
  cat >"$project/trireme/front.cpp" <<'CPP'
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
int main(int count, char** words) {
  char folder[4096];
  std::printf("version 1 in %s:", getcwd(folder, sizeof folder));
  for (int i = 1; i < count; ++i) std::printf(" [%s]", words[i]);
  return count > 1 ? std::atoi(words[1]) : 0;
}
CPP
  cat >"$project/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(Front LANGUAGES CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(trireme_cli trireme/front.cpp)
set_target_properties(trireme_cli PROPERTIES OUTPUT_NAME trireme)
add_executable(trireme_worker trireme/worker.cpp)
add_executable(law tests/law.cpp)
enable_testing()
add_test(NAME law COMMAND law)
add_test(NAME python COMMAND ${TRIREME_PYTHON} -c "import os, sys; sys.exit(os.environ['TRIREME_PYTHON'] != sys.argv[1])" ${TRIREME_PYTHON})
CMAKE
}

rm -rf "$scratch"
make_project
make_torch "$scratch/site" 2.11.0+cu130
make_torch "$scratch/old site" 2.10.1+cu130
export TRIREME_TORCH_DIR=$scratch/site/torch PYTHONPATH=$scratch/site
# A cache folder that cannot be made: any attempt to install something ends the test in an error.
export XDG_CACHE_HOME=/dev/null
unset TRIREME_PYTHON CTEST_PARALLEL_LEVEL
ln -s "$project/trireme.sh" "$scratch/link.sh"
cd "$elsewhere"
front=("$project/trireme.sh" --preset cpu)

expect help 0 'Usage: ./trireme.sh' "$project/trireme.sh" --help
expect build-only 0 'building build/cpu' "${front[@]}" --build-only
expect quiet-when-built 0 '^$' "${front[@]}" --build-only
expect users-folder 0 "^version 1 in $elsewhere: \[0\]$" "${front[@]}" 0
expect arguments-untouched 0 ' \[0\] \[a b\] \[--preset\] \[\]$' "${front[@]}" 0 'a b' --preset ''
expect exit-code-of-command 75 '\[75\]$' "${front[@]}" 75
expect through-a-link 0 "in $elsewhere" "$scratch/link.sh" --preset=cpu 0
expect no-tests-without-test 1 '' test -e "$project/build/cpu/bin/law"

sed -i 's/version 1/version 2/' "$project/trireme/front.cpp"
expect rebuilds-after-edit 0 'version 2 in' "${front[@]}" 0
touch "$project/trireme/new.h"
expect looks-after-new-file 0 'building' "${front[@]}" --build-only
rm "$project/trireme/new.h"
expect looks-after-removal 0 'building' "${front[@]}" --build-only

expect tests 0 '100% tests passed, 0 tests failed out of 2' "${front[@]}" test
expect test-arguments 0 'out of 1' "${front[@]}" test -R law
expect tests-quiet-when-built 0 '^$' "${front[@]}" --build-only test
printf 'int main() { return 1; }\n' >"$project/tests/law.cpp"
expect failing-test 8 '50% tests passed' "${front[@]}" test
expect command-needs-no-tests 0 '^version 2' "${front[@]}" 0

echo 'mistake' >>"$project/trireme/worker.cpp"
expect broken-source 1 "FAILED.*mistake.*build failed" "${front[@]}" 0
sed -i /mistake/d "$project/trireme/worker.cpp"
expect mended-source 0 '^.*version 2' "${front[@]}" 0

expect wrong-torch 3 'it is torch 2.10.1\+cu130.*needs 2.11.x.*Fix:' env "TRIREME_TORCH_DIR=$scratch/old site/torch" "${front[@]}" 0
expect no-torch 3 'version.py is missing.*Fix:' env TRIREME_TORCH_DIR=/nowhere "${front[@]}" 0
make_torch "$scratch/second" 2.11.3
expect torch-changed 0 'configuring' env "TRIREME_TORCH_DIR=$scratch/second/torch" "${front[@]}" --build-only
expect torch-on-path 0 'configuring' env -u TRIREME_TORCH_DIR "${front[@]}" --build-only
rm "$scratch/second/nvidia/cu13/lib/libcudart.so.13"
[[ -e /usr/local/cuda/lib64/libcudart.so.13 ]] ||
  expect no-cudart 3 'libcudart.so.13.*Fix:' env "TRIREME_TORCH_DIR=$scratch/second/torch" "${front[@]}" 0
# Only where no Python of the machine has a torch of its own, which would rightly be taken.
type -ap python3 | while read -r python; do env -u PYTHONPATH "$python" -c 'import torch' 2>/dev/null && exit 1; done &&
  expect unwritable-cache 3 'cannot create.*Fix:' env -u TRIREME_TORCH_DIR PYTHONPATH= "${front[@]}" --preset dev --build-only

expect unknown-preset 2 "no preset 'swift'. Fix: use one of release, " "$project/trireme.sh" --preset swift 0
expect preset-is-a-name 2 'not a valid preset name' "$project/trireme.sh" --preset ../.. --clean
expect preset-without-name 2 'needs a name' "$project/trireme.sh" --preset
mkdir "$scratch/old python"
printf '#!/bin/sh\nexit 1\n' >"$scratch/old python/python3"
chmod +x "$scratch/old python/python3"
expect broken-python-is-passed-over 0 'configuring' env -u TRIREME_TORCH_DIR "PATH=$scratch/old python:$PATH" "${front[@]}" \
  --preset asan --build-only

echo 'no-such-package build no-such-command # breaks' >>"$project/tools/packages.txt"
mkdir "$scratch/bin"
printf '#!/bin/sh\nexit 100\n' | tee "$scratch/bin/apt-get" >"$scratch/bin/sudo"
chmod +x "$scratch"/bin/*
touch "$project/trireme/front.cpp"
expect missing-package 3 'no-such-package.*Fix: run .sudo apt-get update' env "PATH=$scratch/bin:$PATH" "${front[@]}" 0
sed -i /no-such-package/d "$project/tools/packages.txt"

mv "$project" "$scratch/moved"
expect moved-tree 0 'version 2' "$scratch/moved/trireme.sh" --preset cpu 0
sed -i 's/version 2/version 3/' "$scratch/moved/trireme/front.cpp"
"$scratch/moved/trireme.sh" --preset cpu --build-only 2>"$scratch/first" &
"$scratch/moved/trireme.sh" --preset cpu --build-only 2>"$scratch/second-call"
wait
expect two-calls-build-once 0 '^1$' bash -c "cat \"$scratch/first\" \"$scratch/second-call\" | grep -c 'trireme.sh: building'"
expect clean-names-what-it-removes 0 "removing $scratch/moved/build/cpu" "$scratch/moved/trireme.sh" --preset cpu --clean
expect cleaned 1 '' test -e "$scratch/moved/build/cpu"

echo "$((checks - failures)) checks held, $failures failed"
((failures == 0))
