# libtorch: found where it is, or installed from the torch wheel into a private Python environment. Needs $root,
# common.sh and packages.sh. resolve_torch sets torch_dir, torch_python and nvcc.
# shellcheck shell=bash

torch_release=2.11.0
[[ -n ${XDG_CACHE_HOME:-${HOME:-}} ]] || die 3 "neither HOME nor XDG_CACHE_HOME is set. Fix: set one of them."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/trireme

# torch_problem DIR NEED: why the torch in DIR does not serve (need: cpu or cuda); nothing when it does.
torch_problem() {
  local line version='' site=${1%/*}
  [[ -r $1/version.py ]] || { echo "it has no torch (version.py is missing)" && return; }
  while read -r line; do
    [[ $line =~ ^__version__\ =\ [\'\"]([^\'\"]+) ]] && version=${BASH_REMATCH[1]}
  done <"$1/version.py"
  if [[ $version != "${torch_release%.*}".* ]]; then
    echo "it is torch ${version:-of unknown version}, but Trireme needs ${torch_release%.*}.x"
  elif [[ ! -e $1/lib/libtorch_cpu.so || ! -e $1/include/ATen/ATen.h ]]; then
    echo "its C++ libraries or headers are missing"
  elif [[ ! -e $site/nvidia/cu13/lib/libcudart.so.13 && ! -e /usr/local/cuda/lib64/libcudart.so.13 ]]; then
    echo "libcudart.so.13, which its libraries load, is neither beside it nor in /usr/local/cuda"
  elif [[ $2 == cuda && ! (-e $1/lib/libtorch_cuda.so && -e $site/nvidia/nccl/lib/libnccl.so.2 && -d $site/nvidia/cudnn) ]]; then
    echo "the CUDA libraries (NCCL, cuDNN) are not beside it, but this build uses the GPU"
  fi
}

serves() { [[ -n $1 && -z $(torch_problem "$1" "$2") ]]; }

# package_of PYTHON NAME: the folder of the package that PYTHON would import, without importing it.
package_of() {
  (cd / && "$1" -c 'import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(spec.submodule_search_locations[0] if spec else "")' "$2" 2>/dev/null)
}

# can_compare PYTHON: it can import a PyTorch of our release, and numpy.
can_compare() { [[ -x $1 && -n $(package_of "$1" numpy) ]] && serves "$(package_of "$1" torch)" cuda; }

# pythons_on_path: sets the array `pythons`.
pythons_on_path() { mapfile -t pythons < <(type -ap python3 | awk '!seen[$0]++'); }

# find_python: one that torch has wheels for.
find_python() {
  local python seen=''
  local -a pythons
  pythons_on_path
  for python in "${pythons[@]}" python3.14 python3.13 python3.12 python3.11 python3.10; do
    command -v "$python" >/dev/null || continue
    if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      echo "$python"
      return
    fi
    seen+=" $("$python" -V 2>&1) ($python)"
  done
  die 3 "torch $torch_release needs Python 3.10 to 3.14; found:${seen:- none}. Fix: install one of these and put it on" \
    "PATH as python3, or set TRIREME_TORCH_DIR to the folder 'torch' of an installed torch ${torch_release%.*}."
}

venv_torch() { compgen -G "$cache/torch-$torch_release-$1/lib/python3*/site-packages/torch" | head -n 1; }

# is_complete VENV NAME: its last step was copying the requirements that it was made from.
is_complete() { cmp -s "$root/tools/requirements-$2.txt" "$1/.complete-$2"; }

check_disk() {
  local venv=$1 needed_mb=$2 free_mb used_mb=0
  mkdir -p "$cache" || die 3 "cannot create $cache. Fix: make it writable, or set XDG_CACHE_HOME to a writable folder."
  [[ -d $venv ]] && used_mb=$(du -sm "$venv" | cut -f1)
  free_mb=$(df -Pm "$cache" | awk 'NR == 2 {print $4}')
  ((free_mb + used_mb >= needed_mb)) ||
    die 3 "$cache has ${free_mb} MB free, and libtorch needs $((needed_mb - used_mb)) MB more to install. Fix: free some" \
      "space, or set XDG_CACHE_HOME to a folder on a larger disk."
}

make_venv() {
  local venv=$1 python
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
  python=$(find_python) || exit
  "$python" -c 'import ensurepip, venv' 2>/dev/null || require_packages venv
  "$python" -m venv --clear "$venv" >&2 ||
    die 3 "'$python -m venv $venv' failed (see above). Fix: apt-get install python3-venv, or make $cache writable."
}

# install_venv NAME VENV MB TEXT [pip arguments]: completes VENV from tools/requirements-NAME.txt. A call that was cut
# short leaves no mark, and the next one goes on from pip's cache.
install_venv() {
  local name=$1 venv=$2 needed_mb=$3 text=$4
  local -a quiet=()
  shift 4
  is_complete "$venv" "$name" && return
  hold_lock "$cache/lock" installing
  if ! is_complete "$venv" "$name"; then
    check_disk "$venv" "$needed_mb"
    make_venv "$venv"
    say "installing $text into $venv"
    [[ -t 2 ]] || quiet=(--quiet)
    "$venv/bin/python" -m pip --disable-pip-version-check install "${quiet[@]}" "$@" \
      -r "$root/tools/requirements-$name.txt" >&2 ||
      die 3 "pip could not install tools/requirements-$name.txt (see above). Fix: check the network, the proxy or" \
        "pip's configuration and run the same command again (finished downloads are kept), or set TRIREME_TORCH_DIR."
    cp "$root/tools/requirements-$name.txt" "$venv/.complete-$name"
  fi
  release_lock
}

install_torch() {
  local venv=$cache/torch-$torch_release-$1
  case $1 in
    cpu) install_venv cpu "$venv" 2200 "libtorch $torch_release without GPU support (0.6 GB to download, 1.3 GB on disk)" --no-deps ;;
    full) install_venv full "$venv" 7500 "PyTorch $torch_release with CUDA, NCCL and cuDNN (2.5 GB to download, 4.7 GB on disk)" ;;
  esac
}

# torch_variant NEED: what to install. A complete set serves builds without a GPU too; tests need one in any case, for
# Python, but do not rebuild what was built on the small one.
torch_variant() {
  if [[ $1 == cuda ]] || is_complete "$cache/torch-$torch_release-full" full; then
    echo full
  elif ((compare)) && ! is_complete "$cache/torch-$torch_release-cpu" cpu; then
    echo full
  else
    echo cpu
  fi
}

# find_torch NEED RECORDED: sets torch_dir. What the build folder was configured with goes before anything else, so
# that a new installation elsewhere does not rebuild everything.
find_torch() {
  local need=$1 python problem variant
  local -a pythons
  if [[ -n ${TRIREME_TORCH_DIR:-} ]]; then
    torch_dir=$(realpath -m -- "$TRIREME_TORCH_DIR")
    problem=$(torch_problem "$torch_dir" "$need")
    [[ -z $problem ]] || die 3 "TRIREME_TORCH_DIR=$TRIREME_TORCH_DIR: $problem. Fix: point it at the folder 'torch' in" \
      "site-packages of torch $torch_release, or unset it and let ./trireme.sh find or install one."
    return
  fi
  serves "$2" "$need" && torch_dir=$2 && return
  pythons_on_path
  for python in "${pythons[@]}"; do
    torch_dir=$(package_of "$python" torch) || continue
    serves "$torch_dir" "$need" && return
  done
  variant=$(torch_variant "$need")
  install_torch "$variant"
  torch_dir=$(venv_torch "$variant")
}

# find_torch_python RECORDED: sets torch_python, for tests that compare with PyTorch.
find_torch_python() {
  local candidate venv=$cache/torch-$torch_release-full
  local -a pythons
  pythons_on_path
  for candidate in "${TRIREME_PYTHON:-}" "$1" "${torch_dir%/lib/python3*}/bin/python" "${pythons[@]}"; do
    can_compare "$candidate" && torch_python=$candidate && return
  done
  install_torch full
  torch_python=$venv/bin/python
}

is_nvcc_13() { [[ -x $1 && $("$1" --version 2>/dev/null) == *"release 13."* ]]; }

# find_nvcc: sets nvcc; installed from wheels where the machine has a driver but no toolkit.
find_nvcc() {
  local candidate venv=$cache/torch-$torch_release-full
  [[ $torch_dir == "$venv"/* ]] || venv=$cache/nvcc-13.0
  for candidate in "${torch_dir%/*}/nvidia/cu13/bin/nvcc" "$(command -v nvcc || echo -)" /usr/local/cuda/bin/nvcc; do
    is_nvcc_13 "$candidate" && nvcc=$candidate && return
  done
  install_venv nvcc "$venv" 600 "nvcc 13.0 (0.1 GB to download)" --no-deps
  nvcc=$(compgen -G "$venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc" | head -n 1)
}
