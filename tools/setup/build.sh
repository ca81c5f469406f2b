# Configures and builds one preset into build/<preset>. Needs common.sh, packages.sh, torch.sh and trireme.sh's $root,
# $preset, $build, $gpu (yes or no), $mode (command or all) and $compare (1: tests want a PyTorch).
# shellcheck shell=bash

# torch_need: none, cpu or cuda, as the preset asks and the machine has.
torch_need() {
  case $preset in
    plan-only) echo none ;;
    cpu | asan | tsan) echo cpu ;;
    cuda) echo cuda ;;
    *) [[ $gpu == yes ]] && echo cuda || echo cpu ;;
  esac
}

check_preset() {
  local names
  names=$(cd "$root" && cmake --list-presets | sed -n 's/^ *"\([^"]*\)".*/\1/p') || exit 3
  [[ $'\n'$names$'\n' == *$'\n'$preset$'\n'* ]] ||
    die 2 "there is no preset '$preset'. Fix: use one of ${names//$'\n'/, }."
}

check_cmake() {
  local version
  version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  [[ $(printf '%s\n' 3.25 "$version" | sort -V | head -n 1) == 3.25 ]] ||
    die 3 "cmake $version was found, but 3.25 or newer is needed. Fix: put a newer one on PATH ('pip install cmake' installs one)."
}

# resolve_settings: sets the array `settings` and installs what it takes.
resolve_settings() {
  local need known=''
  need=$(torch_need)
  torch_dir='' torch_python=${recorded[python]:-} nvcc=''
  if [[ $need != none ]]; then
    [[ ${recorded[request]:-} != "${TRIREME_TORCH_DIR:-}" ]] || known=${recorded[torch]:-}
    find_torch "$need" "$known"
    [[ $need != cuda ]] || find_nvcc
    ((compare == 0)) || find_torch_python "${recorded[python]:-}"
  fi
  settings="folder=$build
request=${TRIREME_TORCH_DIR:-}
gpu=$gpu
torch=$torch_dir
python=$torch_python
nvcc=$nvcc"
}

# show_failure LOG: from the first failure on, or the end of the log when no step says so.
show_failure() {
  if grep -qE '^(FAILED|CMake Error)' "$1"; then
    awk '/^(FAILED|CMake Error)/ {seen = 1} seen && ++n <= 80' "$1" >&2
  else
    tail -n 40 "$1" >&2
  fi
  say "the whole log is in $1"
}

configure() {
  local log=$build/configure.log
  local -a fresh=()
  [[ -f $build/build.ninja && $settings == "$(cat "$build/trireme-settings" 2>/dev/null)" ]] && return
  [[ ${recorded[folder]:-$build} == "$build" ]] || fresh=(--fresh)
  say "configuring build/$preset"
  # Libraries that an earlier configuration found inside another torch must not outlive it.
  (cd "$root" && cmake "${fresh[@]}" --preset "$preset" -U TRIREME_CUDART -U TRIREME_NCCL -U TRIREME_NVCC \
    ${torch_dir:+-DTRIREME_TORCH_DIR="$torch_dir"} ${torch_python:+-DTRIREME_PYTHON="$torch_python"} \
    ${nvcc:+-DTRIREME_NVCC="$nvcc"}) >"$log" 2>&1 || {
    show_failure "$log"
    die 3 "cmake could not configure build/$preset (see above)"
  }
  printf '%s\n' "$settings" >"$build/trireme-settings"
}

# report_progress LOG: keeps all lines, shows one each ten percent.
report_progress() {
  local line next=10 percent
  while IFS= read -r line; do
    printf '%s\n' "$line" >&3
    [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
    percent=$((BASH_REMATCH[1] * 100 / BASH_REMATCH[2]))
    ((percent >= next)) || continue
    say "$percent% of build/$preset (${BASH_REMATCH[1]}/${BASH_REMATCH[2]})"
    next=$((percent - percent % 10 + 10))
  done 3>"$1"
}

# run_build: on a terminal ninja itself shows progress and failures; elsewhere they go through a log.
run_build() {
  local log=$build/build.log jobs
  jobs=$(jobs_for_memory)
  local -a command=(cmake --build "$build" -j "$jobs")
  if [[ $mode == command ]]; then
    command+=(--target trireme_cli)
    [[ -z $torch_dir ]] || command+=(trireme_worker)
  fi
  if [[ -t 2 ]]; then
    "${command[@]}" >&2 || die 1 "the build failed (see above)"
  else
    "${command[@]}" 2>&1 | report_progress "$log" || {
      show_failure "$log"
      die 1 "the build failed (see above)"
    }
  fi
}

# prepare: everything from a bare machine to finished binaries.
prepare() {
  local settings torch_dir nvcc
  require_packages build
  [[ $preset != plan-only ]] || require_packages plan-only
  [[ $preset != [at]san ]] || require_packages sanitizers
  check_cmake
  check_preset
  [[ -f $build/build.ninja ]] || suggest_packages optional
  hold_lock "$build.lock" "building build/$preset"
  is_built && release_lock && return # another call did it meanwhile
  mkdir -p "$build"
  resolve_settings
  # The stamp is as old as the start of the build, so that edits made meanwhile count as newer.
  : >"$build/trireme-stamp"
  configure
  say "building build/$preset"
  run_build
  mv "$build/trireme-stamp" "$build/trireme-built-$mode"
  release_lock
}
