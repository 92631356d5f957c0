#!/bin/sh
# Prints the Python that set-up runs with: $PYTHON, else the one in .venv, else the first of the
# usual names that really runs (a pyenv shim may exist and fail) and is 3.11 or 3.12, else any
# Python 3, so that set-up itself can report the problem.
runs() { "$1" -c "import sys; sys.exit($2)" >/dev/null 2>&1; }

if [ -n "$PYTHON" ]; then
    if runs "$PYTHON" "sys.version_info < (3,)"; then echo "$PYTHON"; exit 0; fi
    echo "PYTHON=$PYTHON does not run: give the path of a Python 3.11 or 3.12." >&2; exit 1
fi
for python in .venv/bin/python python3.11 python3.12 python3 python; do
    if runs "$python" "not ((3, 11) <= sys.version_info < (3, 13))"; then echo "$python"; exit 0; fi
done
for python in python3 python; do
    if runs "$python" "sys.version_info < (3,)"; then echo "$python"; exit 0; fi
done
echo "No Python was found: install Python 3.11 or 3.12 (Debian: apt-get install python3 python3-venv)," \
     "or call make with PYTHON=/path/to/python3.11." >&2
exit 1
