#!/bin/sh
# make_venv.sh DIR: makes the virtual environment DIR, with pip in it, from the Python that find_python.sh finds.
#
# DIR that works already is kept. Debian's Python may lack `ensurepip`, the part that puts pip into an environment: then
# virtualenv, uv or the pip of that Python itself do it, whichever is there.

set -eu

dir=$1
here=$(dirname "$0")

if "$dir/bin/python" -c 'import sys; raise SystemExit(sys.version_info < (3, 12))' 2>/dev/null &&
    "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

python=$("$here/find_python.sh")
echo "$dir: a new environment from $python ($("$python" -V))"
rm -rf "$dir"

if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    "$python" -m venv "$dir"
elif "$python" -m virtualenv --version >/dev/null 2>&1; then
    "$python" -m virtualenv --quiet "$dir"
elif command -v uv >/dev/null 2>&1; then
    uv venv --quiet --seed --python "$python" "$dir"
elif "$python" -c 'import venv, pip' 2>/dev/null; then
    "$python" -m venv --without-pip "$dir"
    "$python" -m pip --quiet --python "$dir/bin/python" install pip
else
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    cat >&2 <<EOT
$python cannot make a virtual environment: it lacks the modules venv and ensurepip, and there is no virtualenv, uv or pip.
On Debian and Ubuntu:  apt-get install python$version-venv
or name a Python that has what pyproject.toml lists under "test":  make test PYTHON=/path/to/python
EOT
    exit 1
fi
