#!/bin/sh
# Make or repair the virtual environment that the Makefile uses.
#
#   sh helpers/setup_environment.sh VENV [JAX_VERSION]   make VENV ready; JAX_VERSION overrides the pinned one
#   sh helpers/setup_environment.sh --find               print the Python that would be used
#
# The environment is complete when VENV/complete holds the checksum of what it was made from. That
# file is written last, so an interrupted installation is noticed and done again.

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
  Debian, Ubuntu   sudo apt install python3.12 python3.12-venv
  Fedora           sudo dnf install python3.12
  macOS            brew install python@3.12
  Windows          use WSL and follow Ubuntu
  anywhere         install uv (https://docs.astral.sh/uv), then run this command again
  conda            conda env create -f environment.yml
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
made_from="$(cat pyproject.toml constraints.txt | cksum) $jax_version"
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/complete" 2>/dev/null)" = "$made_from" ] &&
    "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

python=$(find_python)
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    echo "$venv exists and is not a virtual environment; move it away, or choose another: make lab VENV=.venv2" >&2
    exit 1
fi
echo "Setting up $venv with $("$python" --version). This happens once and takes a minute or two." >&2
rm -rf "$venv"
"$python" -m venv "$venv"
constraints=$venv/constraints.txt
if [ -n "$jax_version" ]; then
    sed -E "s/^(jax|jaxlib)==.*/\1==$jax_version/" constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
fi
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$constraints" --editable '.[test]'; then
    echo "The installation into $venv did not finish; the lines above say why. Run the same command to try again." >&2
    exit 1
fi
# Nothing is fetched at run time: JupyterLab asks neither for news of itself nor for updates.
mkdir -p "$venv/etc/jupyter/labconfig"
echo '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}' \
    >"$venv/etc/jupyter/labconfig/page_config.json"
echo "$made_from" >"$venv/complete"
