#!/usr/bin/env bash
# The tests of `make test` with other versions of Python and PyTorch, each in an environment of its own:
#
#   tests/versions.sh /path/to/python3.10=2.8.0 /path/to/python3.13=2.15.0
#
# An environment takes up to 8 GB, since PyPI's PyTorch brings CUDA's libraries; they are made under $ENVIRONMENTS, or
# in a temporary folder that is removed afterwards. Prints a line for each pair; exit status 1 if one of them failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -eq 0 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi
work=${ENVIRONMENTS:-$(mktemp -d)}
[ -n "${ENVIRONMENTS:-}" ] || trap 'rm -rf "$work"' EXIT
results=()
status=0
for pair in "$@"; do
    python=${pair%=*}
    torch=${pair##*=}
    name="$("$python" -c 'import platform; print("python", platform.python_version())' | tr -d ' ')-torch$torch"
    tree="$work/$name"
    echo "== $name"
    outcome="could not be installed"
    mkdir -p "$work"
    rm -rf "$tree"
    if git clone -q . "$tree" && { [ -x "$tree-env/bin/pytest" ] || "$python" -m venv "$tree-env"; } &&
        "$tree-env/bin/pip" install -q "torch==$torch" -e "$tree[test]"; then
        made=$("$tree-env/bin/python" -c 'import numpy, torch, triton; print(torch.__version__, "triton", triton.__version__, "numpy", numpy.__version__)')
        (cd "$tree" && "$tree-env/bin/python" -m pytest -q -n 2 --dist loadfile --budget=270 ${PYTEST_ARGS:-}) | tee "$tree-env/log"
        passed=${PIPESTATUS[0]}
        outcome="torch $made: $(tail -n 1 "$tree-env/log")"
        [ "$passed" -eq 0 ] || status=1
    else
        status=1
    fi
    results+=("$name: $outcome")
done
printf '%s\n' "" "${results[@]}"
exit "$status"
