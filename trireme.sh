#!/usr/bin/env bash
# The one front door: installs what is missing, builds what changed, then runs the trireme command. See --help.
set -euo pipefail
unset CDPATH
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

usage() {
  cat <<'TEXT'
Usage: ./trireme.sh [options] VERB [arguments]   run 'trireme VERB ...', building it first if needed
       ./trireme.sh [options] test [arguments]   build all tests and run ctest with these arguments

Options, before the verb only:
  --preset NAME   a configuration of CMakePresets.json (default: release)
  --build-only    set up and build, but run nothing ('--build-only test' also builds the tests)
  --clean         remove build/NAME first; without a verb, do only that
  --help          print this text; './trireme.sh help' prints the help of trireme itself

Missing distribution packages are installed with apt-get (asking for sudo when needed). libtorch 2.11 is taken from
TRIREME_TORCH_DIR, or a Python on PATH that has it, or installed into ${XDG_CACHE_HOME:-~/.cache}/trireme.
Exit codes: 1 the build failed, 2 wrong usage, 3 something is missing on this machine (the message says what);
otherwise those of the command.
TEXT
}

# Settings that the build folder was configured with, lines name=value, into the array `recorded`.
read_settings() {
  local key value
  recorded=()
  [[ -r $build/trireme-settings ]] || return 0
  while IFS='=' read -r key value; do recorded[$key]=$value; done <"$build/trireme-settings"
}

# has_settings: the build folder was configured for this place, this request, this machine, and a torch still there.
has_settings() {
  [[ ${recorded[folder]:-} == "$build" && ${recorded[request]} == "${TRIREME_TORCH_DIR:-}" &&
    ${recorded[gpu]} == "$gpu" && (-z ${recorded[torch]} || -e ${recorded[torch]}/version.py) ]]
}

# is_current STAMP SOURCES...: the stamp is newer than the sources and than the installed packages.
is_current() {
  local stamp=$1
  shift
  [[ -f $stamp && ! /var/lib/dpkg/status -nt $stamp ]] || return 1
  [[ -z $(cd "$root" && find "$@" -name __pycache__ -prune -o -newer "$stamp" -print -quit) ]]
}

# is_built: nothing to install, configure or build. Answers in milliseconds, so that every run can ask.
is_built() {
  local folder
  local -a sources=(CMakeLists.txt CMakePresets.json cmake trireme)
  read_settings
  [[ -x $build/bin/trireme ]] && has_settings || return 1
  torch_python=${recorded[python]}
  if ((compare)); then
    [[ -x $torch_python ]] || return 1
  fi
  [[ $mode == all ]] || ! is_current "$build/trireme-built-command" "${sources[@]}" || return 0
  for folder in tests examples labs; do
    [[ ! -e $root/$folder ]] || sources+=("$folder")
  done
  is_current "$build/trireme-built-all" "${sources[@]}"
}

set_up() {
  # shellcheck source=tools/setup/common.sh
  source "$root/tools/setup/common.sh"
  # shellcheck source=tools/setup/packages.sh
  source "$root/tools/setup/packages.sh"
  # shellcheck source=tools/setup/torch.sh
  source "$root/tools/setup/torch.sh"
  # shellcheck source=tools/setup/build.sh
  source "$root/tools/setup/build.sh"
  prepare
}

clean() {
  [[ -d $build ]] || return 0
  echo "trireme.sh: removing $build" >&2
  rm -rf -- "$build"
}

run_tests() {
  [[ -z $torch_python ]] || export TRIREME_PYTHON=$torch_python
  export CTEST_PARALLEL_LEVEL=${CTEST_PARALLEL_LEVEL:-$(nproc)}
  cd "$root"
  exec ctest --preset "$preset" "$@"
}

refuse() {
  echo "trireme.sh: $1" >&2
  exit 2
}

preset=release build_only=0 cleaning=0
while (($#)); do
  case $1 in
    --preset) [[ $# -gt 1 ]] || refuse "--preset needs a name. Fix: --preset release." ;&
    --preset=*)
      [[ $1 == --preset ]] && shift
      preset=${1#--preset=}
      ;;
    --build-only) build_only=1 ;;
    --clean) cleaning=1 ;;
    --help | -h) usage && exit 0 ;;
    *) break ;;
  esac
  shift
done
[[ $preset =~ ^[A-Za-z0-9][A-Za-z0-9_-]*$ ]] || refuse "'$preset' is not a valid preset name. Fix: --preset release."
build=$root/build/$preset
if ((cleaning)); then
  clean
  ((build_only || $#)) || exit 0
fi

mode='command' compare=0 gpu=no torch_python=''
if [[ ${1:-} == test ]]; then
  mode=all
  [[ $preset == plan-only ]] || compare=1
fi
! compgen -G '/dev/nvidia[0-9]*' >/dev/null || gpu=yes
declare -A recorded

is_built || set_up
if ((build_only)); then
  exit 0
elif [[ $mode == all ]]; then
  run_tests "${@:2}"
fi
exec "$build/bin/trireme" "$@"
