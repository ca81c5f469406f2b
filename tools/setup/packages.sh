# Distribution packages: what tools/packages.txt asks for, whether it is there, and how it gets there. Looking spawns
# no process. Needs $root and common.sh.
# shellcheck shell=bash

has_header() {
  local folder
  local -a folders=(/usr/include /usr/local/include "/usr/include/$HOSTTYPE-linux-gnu")
  local -a prefixes
  IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for folder in "${prefixes[@]}"; do folders+=("$folder/include"); done
  for folder in "${folders[@]}"; do
    [[ -e $folder/$1 ]] && return 0
  done
  return 1
}

is_present() {
  case $1 in
    -) return 1 ;;
    /*) [[ -e $1 ]] ;;
    */* | *.h | *.hpp) has_header "$1" ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

# missing_packages NEED...: names of packages of those needs that are not here.
missing_packages() {
  local name need probe _
  while read -r name need probe _; do
    [[ -z $name || $name == \#* || " $* " != *" $need "* ]] && continue
    is_present "$probe" || echo "$name"
  done <"$root/tools/packages.txt"
}

# become_root: sets the array `as_root`; fails when there is no way to.
become_root() {
  as_root=()
  ((EUID == 0)) && return 0
  command -v sudo >/dev/null || return 1
  if sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  elif [[ -t 0 && -t 2 ]]; then
    as_root=(sudo)
  else
    return 1
  fi
}

apt_get() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 "$@" >&2; }

# apt_install NAME...: package lists are fetched only when there are none or the first try fails.
apt_install() {
  command -v apt-get >/dev/null && become_root || return 1
  say "installing distribution packages: $*"
  if compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; then
    apt_get install -y --no-install-recommends "$@" && return 0
  fi
  apt_get update && apt_get install -y --no-install-recommends "$@"
}

refuse_missing() {
  if command -v apt-get >/dev/null; then
    die 3 "these packages are missing and could not be installed: $*. Fix: run" \
      "'sudo apt-get update && sudo apt-get install -y $*', then the same command again."
  fi
  die 3 "these packages are missing, and this system has no apt-get: $* (Debian's names; what each one is for is in" \
    "tools/packages.txt). Fix: install them with this system's own package manager."
}

# require_packages NEED...: returns with every package of those needs installed, or exits with 3.
require_packages() {
  local -a missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]} == 0)) || apt_install "${missing[@]}" || refuse_missing "${missing[@]}"
}

# suggest_packages NEED...: the same for packages that the build can do without.
suggest_packages() {
  local -a missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]} == 0)) || apt_install "${missing[@]}" ||
    say "going on without ${missing[*]}, which would make builds faster or complete"
}
