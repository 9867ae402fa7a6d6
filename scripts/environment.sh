# Sourced by the other scripts: creates or updates their virtual environment if needed.
#
#   prepare_environment [EXTRA ...]   installs meshtrain with these extras of pyproject.toml (`cuda`: the CUDA extra for
#                                     the NVIDIA driver, if any); sets `environment`: run "$environment/bin/python"
#
# The Python is that of the existing environment; for a new one the first of python3.12, python3.13 and python3 that
# works. PyTorch (extras eval and transformers) has a package without CUDA for Python 3.11, so python3.11 comes first
# there. Plans for GPUs (extra plan-gpu) need 3.12. PYTHON names another interpreter; if its version is not the one
# that would be used without PYTHON, the folder's name ends in -<version>, so that several versions can coexist.
#
# The folder is .venv, with these exceptions. .venv-plan has the compilers for planning (extras plan-*), because with
# them every `import jax` searches for accelerators and prints that there are none. .venv-eval has the evaluation
# harness (extra eval), whose packages take 760 MB and need older versions of others. .venv-transformers has PyTorch
# and the packages that read our exports (extra transformers).
#
# constraints.txt fixes the versions, except if the extras contain `newest` (.venv-newest), and except in .venv-eval.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
oldest_minor=11 purpose=meshtrain # needs Python 3.11; pyproject.toml says the same to pip

say() { printf 'meshtrain: %s\n' "$*" >&2; }

fail() {
  printf 'meshtrain: error: %s\n' "$*" >&2
  exit 2
}

# Prints "major.minor" of an interpreter, also of Python 2; fails if it does not run.
version_of() { "$1" -c 'import sys; sys.stdout.write("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null; }

# True if `version` is not too old.
new_enough() { [[ $version =~ ^3\.([0-9]+)$ ]] && ((BASH_REMATCH[1] >= oldest_minor)); }

# True if `interpreter` can create virtual environments; Debian's packages of Python cannot.
has_venv() { "$interpreter" -c 'import ensurepip, venv' 2>/dev/null </dev/null; }

# Prints the newest interpreter of that name below pyenv, whose shims answer for the enabled versions only.
below_pyenv() {
  local folder
  folder=$(pyenv root 2>/dev/null) || return 1
  find "$folder/versions" -mindepth 3 -maxdepth 3 -path "*/bin/$1" 2>/dev/null | sort -V | tail -n 1 | grep .
}

# Sets `interpreter` and `version` to the Python of this name or path; fails if it does not run, also below pyenv.
find_interpreter() {
  interpreter=$1
  version=$(version_of "$interpreter") && return
  interpreter=$(below_pyenv "$1") && version=$(version_of "$interpreter")
}

# Sets `interpreter` and `version` to the Python to use without PYTHON, for these extras; fails if there is none.
default_interpreter() {
  local names=(python3.12 python3.13 python3) name suffices
  [[ " $* " =~ " eval "|" transformers " ]] && names=(python3.11 "${names[@]}")
  interpreter=$environment/bin/python
  [[ $(recorded) != installing* ]] && version=$(version_of "$interpreter") && new_enough && return
  for suffices in has_venv true; do
    for name in "${names[@]}"; do
      find_interpreter "$name" && new_enough && $suffices && return
    done
  done
  return 1
}

# Sets `interpreter` and `version`, or ends with one line. If PYTHON has another version than the default, adds it to
# `environment`. Arguments: the extras.
choose_interpreter() {
  if [[ -z ${PYTHON:-} ]] && default_interpreter "$@"; then return; fi
  local wanted=${PYTHON:-python3} name other=""
  find_interpreter "$wanted" ||
    fail "$wanted does not run; $purpose needs Python 3.$oldest_minor or newer (PYTHON=... names another one)"
  if ! new_enough; then
    local its_version=$version
    for name in python3.{12,13,14,11}; do
      find_interpreter "$name" && new_enough && other="; this machine has one: PYTHON=$name $0" && break
    done
    fail "$purpose needs Python 3.$oldest_minor or newer; $wanted is Python $its_version$other"
  fi
  [[ $version == "$(default_interpreter "$@" && printf %s "$version")" ]] || environment+=-$version
}

# Sets `cuda` to the extra for the NVIDIA driver, or to nothing, and prints the choice.
choose_cuda() {
  local answer driver capability
  # A query of the driver can take a second, so a choice is reused.
  if [[ $(recorded) =~ \ (cuda1[0-9])( |$) ]]; then
    cuda=${BASH_REMATCH[1]}
    return
  fi
  cuda=""
  type -P nvidia-smi >/dev/null || return 0
  answer=$(timeout 20 nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null </dev/null) ||
    return 0
  [[ ${answer%%$'\n'*} =~ ^([0-9]+)\.[0-9.]+,\ *([0-9]+)\.([0-9]+)$ ]] || return 0
  driver=${BASH_REMATCH[1]} capability=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
  # CUDA 13 needs driver 580 and a GPU from Turing on; CUDA 12's packages need driver 525.
  if ((driver >= 580 && capability >= 75)); then
    cuda=cuda13
  elif ((driver >= 525)); then
    cuda=cuda12
  else
    say "nvidia-smi answers, but driver $driver is too old for CUDA 12 (it needs 525): staying on the CPU"
    return
  fi
  say "nvidia-smi answers (driver $driver): installing the extra $cuda"
}

# Prints the record of the environment, as written by `install`: "KEY extras: EXTRA ..."
recorded() { cat "$environment/meshtrain-installed" 2>/dev/null || true; }

# True if the environment is complete. Arguments: the key (folder, Python, the files with versions) and the extras.
up_to_date() {
  local key=$1 extra have
  shift
  have=$(recorded)
  [[ $have == "$key extras: "* && -x $environment/bin/python ]] || return 1
  for extra in "$@"; do
    [[ " ${have##*extras:} " == *" $extra "* ]] || return 1
  done
}

prepare_environment() {
  environment=$root/.venv
  [[ " $* " == *" plan-"* ]] && environment+=-plan
  [[ " $* " == *" eval "* ]] && environment+=-eval
  [[ " $* " == *" transformers "* ]] && environment+=-transformers
  [[ " $* " == *" newest "* ]] && environment+=-newest
  # The GPU compiler fits only one version of JAX, which needs Python 3.12.
  [[ " $* " == *" plan-gpu "* ]] && oldest_minor=12 purpose="a plan for GPUs"
  choose_interpreter "$@"
  local base key extras=("$@")
  if [[ " $* " == *" cuda "* ]]; then
    choose_cuda
    extras=(${extras[@]/#cuda/$cuda})
  fi
  extras=(${extras[@]/#newest/})
  base="$root python$version"
  key="$base $(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum | cut -c -16)"
  if ! up_to_date "$key" "${extras[@]}"; then
    # Only one script installs at a time: a second script waits, and then finds a complete environment.
    exec 9<"$root/scripts"
    if type -P flock >/dev/null && ! flock --nonblock 9; then
      say "another script is installing; waiting for it"
      flock 9
    fi
    up_to_date "$key" "${extras[@]}" || install "$base" "$key" "${extras[@]}"
    exec 9<&-
  fi
}

# Creates or updates the environment. Its record contains `installing` until everything is done, so an interrupted
# installation is repeated from scratch. A changed pyproject.toml or a new extra only updates the environment.
install() {
  local base=$1 key=$2 have extra extras record constraints=(--constraint "$root/constraints.txt")
  shift 2
  # An interpreter inside one of our own environments would be deleted while the environment is created.
  if [[ $(type -P "$interpreter") == "$root"/.venv* ]]; then
    interpreter=$("$interpreter" -c 'import sys; print(sys._base_executable)')
  fi
  has_venv ||
    fail "$interpreter has no module venv; on Debian and Ubuntu: apt install python3-venv"
  have=$(recorded)
  record=$environment/meshtrain-installed
  if [[ $have == "$base "* ]]; then
    extras=${have##*extras: }
    for extra in "$@"; do
      [[ " $extras " == *" $extra "* ]] || extras+=" $extra"
    done
    extras=${extras# }
  else
    extras=$*
    if [[ -z $have && -e $environment ]]; then
      [[ $(version_of "$environment/bin/python") == "$version" ]] ||
        fail "$environment is there and no environment of Python $version; move it away and start again"
    else
      rm -rf "$environment"
    fi
  fi
  say "installing meshtrain${extras:+[${extras// /,}]} for Python $version into ${environment#"$root"/} (once; a few minutes)"
  if [[ $version == 3.11 ]]; then
    local why="3.12 or newer gets fixes"
    [[ " $extras " =~ " eval "|" transformers " ]] && why="PyTorch has a package without CUDA for it"
    say "Python 3.11: jax 0.10.2, the last for it; $why"
  fi
  if [[ ! -x $environment/bin/python ]]; then
    mkdir -p "$environment"
    echo installing >"$record"
    "$interpreter" -I -m venv "$environment" >&2 || fail "making $environment failed; see above"
  fi
  echo installing >"$record"
  [[ ${environment##*/} =~ -(newest|eval) ]] && constraints=()
  "$environment/bin/python" -I -m pip install -qq --disable-pip-version-check --no-input "${constraints[@]}" \
    --editable "$root${extras:+[${extras// /,}]}" >&2 </dev/null || fail "the installation failed; see pip's lines above"
  echo "$key extras: $extras" >"$record"
}
