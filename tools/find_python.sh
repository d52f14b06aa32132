#!/bin/sh
# Prints the path of a CPython >= 3.12 on this machine; says what to do when there is none.
#
#   tools/find_python.sh          search, nearest first: PATH, then the folders that version managers install to
#   PYTHON=... tools/find_python.sh   only check that one
#
# Every candidate is run, never judged by its name: a version manager's shim may exist and fail. Among those that are new
# enough, one that can make a virtual environment by itself comes first (Debian packs that part of Python separately).

set -u
HOME=${HOME:-/nowhere}

fits='import sys; raise SystemExit(sys.implementation.name != "cpython" or sys.version_info < (3, 12))'
makes_venv='import ensurepip, venv'

is_fit() { "$1" -c "$fits" >/dev/null 2>&1 </dev/null; }

if [ -n "${PYTHON:-}" ]; then
    if is_fit "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    if command -v "$PYTHON" >/dev/null; then
        echo "PYTHON=$PYTHON: jaxarena needs CPython >= 3.12, and this is $("$PYTHON" -V 2>&1 </dev/null | head -n 1)" >&2
    else
        echo "PYTHON=$PYTHON: there is no such program" >&2
    fi
    exit 1
fi

# One candidate a line. A pattern that matches nothing stays as it is, and then fails to run like any other path.
candidates() {
    for name in python3.14 python3.13 python3.12 python3 python; do
        command -v "$name"
    done
    if command -v uv >/dev/null 2>&1; then
        uv python find --no-project '>=3.12' 2>/dev/null </dev/null
    fi
    for prefix in \
        "${CONDA_PREFIX:-/nowhere}" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/* \
        "$HOME"/.pyenv/versions/* \
        "$HOME"/.local/share/uv/python/* \
        "$HOME"/.local/share/mise/installs/python/* \
        "$HOME"/.asdf/installs/python/* \
        "$HOME"/.local \
        "$HOME"/miniforge3 "$HOME"/miniforge3/envs/* \
        "$HOME"/miniconda3 "$HOME"/miniconda3/envs/* \
        "$HOME"/anaconda3 "$HOME"/anaconda3/envs/* \
        /usr /usr/local /opt/homebrew /opt/local \
        /opt/conda /opt/conda/envs/* \
        /opt/python* /opt/python/* \
        /Library/Frameworks/Python.framework/Versions/*; do
        for name in python3.14 python3.13 python3.12 python3; do
            echo "$prefix/bin/$name"
        done
    done
}

# PATH's own findings first, so that what the user set up is what is used.
second_choice=
while IFS= read -r candidate; do
    [ -x "$candidate" ] && is_fit "$candidate" || continue
    if "$candidate" -c "$makes_venv" >/dev/null 2>&1 </dev/null; then
        echo "$candidate"
        exit 0
    fi
    [ -n "$second_choice" ] || second_choice=$candidate
done <<EOT
$(candidates 2>/dev/null)
EOT

if [ -n "$second_choice" ]; then
    echo "$second_choice"
    exit 0
fi

cat >&2 <<'EOT'
jaxarena needs Python >= 3.12, and none was found on PATH or where pyenv, uv, conda, mise, asdf and Homebrew install to.
Install one, for example:
    apt-get install python3.12 python3.12-venv      (Debian, Ubuntu)
    uv python install 3.12                          (anywhere, with uv)
    pyenv install 3.12                              (anywhere, with pyenv)
or name one that you have:  make test PYTHON=/path/to/python
(with PYTHON=... nothing is installed: that Python must have what pyproject.toml lists under "test")
EOT
exit 1
