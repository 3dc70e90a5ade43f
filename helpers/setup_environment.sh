#!/bin/sh
# Make or repair the virtual environment that the Makefile uses.
#
#   sh helpers/setup_environment.sh VENV [JAX_VERSION]   make VENV ready; JAX_VERSION overrides the pinned one
#   sh helpers/setup_environment.sh --find               print the Python that would be used
#
# The environment is complete when VENV/complete holds the checksum of what it was made from, and where: an
# environment finds the series by its path, and cannot be moved. That file is written last, so an interrupted
# installation is noticed and done again.

set -eu
cd "$(dirname "$0")/.."

suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        # A name can be on the PATH and still not run: pyenv leaves such shims. So run it.
        if [ -n "$candidate" ] && suits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null 2>&1; then
        uv python find '>=3.12' 2>/dev/null && return
        if uv python install 3.12 >&2; then
            uv python find 3.12 && return
        fi
    fi
    cat >&2 <<'END'
This series needs Python 3.12 or newer, with its venv module, and none was found. Any of these brings one:
  Debian 13, Ubuntu 24.04, or newer   sudo apt install python3 python3-venv
  Fedora                              sudo dnf install python3.12
  macOS                               brew install python@3.12
  Windows                             use WSL and follow Ubuntu
  older ones, and anywhere            install uv (https://docs.astral.sh/uv), then run this command again
  with pyenv                          pyenv install 3.12, then run this command again
  with conda                          conda env create -f environment.yml, then follow the README
If Python is in an unusual place, name it: make lab PYTHON=/path/to/python3.12
END
    return 1
}

if [ "${1:-}" = --find ]; then
    find_python
    exit
fi

venv=$1
jax_version=${2:-}
made_from="$(cat pyproject.toml constraints.txt | cksum) $jax_version in $(pwd -P)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/complete" 2>/dev/null)" = "$made_from" ] &&
    "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

if [ "$(uname -sm 2>/dev/null)" = "Darwin x86_64" ]; then
    cat >&2 <<'END'
JAX is made for Macs with Apple silicon, no longer for those with an Intel processor. On such a Mac, the series can be
read as pages, or run in Colab. If this Mac has Apple silicon, the terminal runs under Rosetta: open one that does not.
END
    exit 1
fi

python=$(find_python)
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    echo "$venv exists and is not a virtual environment; move it away, or choose another: make lab VENV=.venv2" >&2
    exit 1
fi
echo "Setting up $venv with $("$python" --version). Later this is skipped, unless the packages or this folder's name have changed." >&2
rm -rf "$venv" 2>/dev/null || :
if ! mkdir -p "$venv" 2>/dev/null || [ ! -w "$venv" ]; then
    echo "$venv cannot be written in $(pwd -P). Copy the whole folder to a place where you may write, and run the" \
        "same command there." >&2
    exit 1
fi
"$python" -m venv "$venv"
constraints=$venv/constraints.txt
if [ -n "$jax_version" ]; then
    sed -E "s/^(jax|jaxlib)==.*/\1==$jax_version/" constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
fi

# pip_setting NAME: what pip was told in its files or in the environment; each . in NAME stands for a hyphen.
pip_setting() {
    for level in :env: install global; do
        value=$(printf '%s\n' "$pip_settings" | sed -n "s/^$level\.$1='\(.*\)'\$/\1/p" | sed 's/\\n/ /g; s/^ *//')
        [ -z "$value" ] || break
    done
    echo "$value"
}

# uv takes a fraction of pip's time. It is looked for on the PATH, then installed beside pip, and it asks
# where pip was told to ask. Whatever goes wrong with it, pip does the work.
install_with_uv() {
    uv=$(command -v uv) || uv=$venv/bin/uv
    [ -x "$uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$constraints" uv >/dev/null 2>&1 && [ -x "$uv" ] || return 1
    pip_settings=$("$venv/bin/python" -m pip config list 2>/dev/null) || pip_settings=
    where=$(pip_setting index.url)
    [ -z "$where" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$where}"
    where=$(pip_setting extra.index.url)
    [ -z "$where" ] || export UV_INDEX="${UV_INDEX:-$where}"
    where=$(pip_setting find.links | sed 's/  */,/g')
    [ -z "$where" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$where}"
    case $(pip_setting no.index) in 1 | true | True | yes | on) export UV_NO_INDEX=1 ;; esac
    # As pip does: the best version of all indexes, not that of the first which knows the name; and byte code at once,
    # without which every kernel would compile JAX anew where Python may not write it (PYTHONDONTWRITEBYTECODE).
    UV_HTTP_RETRIES=0 "$uv" pip install --quiet --index-strategy unsafe-best-match --compile-bytecode \
        --python "$venv/bin/python" --constraint "$constraints" --editable '.[test]' 2>/dev/null
}

install_with_pip() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$constraints" --editable '.[test]'
}

{
    printf 'Installing about a hundred packages '
    while sleep 1 && kill -0 $$ 2>/dev/null; do printf .; done
} >&2 &
dots=$!
trap 'kill $dots 2>/dev/null || :; echo >&2' EXIT
trap 'exit 130' INT TERM
if ! install_with_uv && ! install_with_pip; then
    echo "The installation into $venv did not finish; the lines above say why. Run the same command to try again." >&2
    exit 1
fi
# Nothing is fetched at run time: JupyterLab asks neither for news of itself nor for updates.
mkdir -p "$venv/etc/jupyter/labconfig"
echo '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}' \
    >"$venv/etc/jupyter/labconfig/page_config.json"
printf '%s\n' "$made_from" >"$venv/complete"
