# Which Python the scripts of this folder use, in $python. They source this file in the repository's root.
#
# The active virtual environment where it holds the packages, else .venv of `make setup`, else python3 where that does.
_has_packages() {
    "$1" -c 'import sys; from importlib.util import find_spec; sys.exit(not (find_spec("hydra") and find_spec("torch")))'
}

python=python3
if [[ -x .venv/bin/python ]] && { [[ -z "${VIRTUAL_ENV:-}" ]] || ! _has_packages python3; }; then
    python=.venv/bin/python
fi
if ! _has_packages "$python"; then
    echo "$(basename "$0"): $python lacks the packages; run \`make setup\` in $PWD first." >&2
    exit 1
fi
