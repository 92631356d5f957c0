#!/bin/sh
# A learner's copy of the course, fresh:  pull.sh ADDRESS BRANCH FOLDER   (`make update` calls it, too)
#
# The first call clones. Each later one brings in what has changed, by nbgitpuller, which keeps what
# the learner has written: where both sides changed a line, the learner's stays. Without a network
# the copy is used as it is; this fails only if there is none.
set -eu
address=$1 branch=$2 folder=$3
course=$(cd "$(dirname "$0")/../.." && pwd)

if [ ! -d "$folder" ]; then
    rm -rf "$folder.partial" # of a clone that was cut off
    gitpuller "$address" "$branch" "$folder.partial"
    mv "$folder.partial" "$folder"
fi

# What lessons say of .venv/bin holds in the copy, too.
[ ! -d "$course/.venv" ] || [ -e "$folder/.venv" ] || ln -s "$course/.venv" "$folder/.venv"

# Lines of two good notebooks can make a broken one: then the learner's is kept whole.
merge='cp %A %A.mine; git merge-file -q --ours %A %O %B
    python -c "import nbformat, sys; nbformat.validate(nbformat.read(sys.argv[1], 4))" %A ||
        cp %A.mine %A
    rm %A.mine'

attributes="$folder/.git/info/attributes"
{ grep -qs merge=notebook "$attributes" || echo "*.ipynb merge=notebook" >> "$attributes"; } &&
    git -C "$folder" config merge.notebook.driver "$merge" &&
    timeout 60 git -C "$folder" fetch && # what may hang may be cut off here, and not in a merge
    gitpuller "$address" "$branch" "$folder" ||
    echo "The course was not brought up to date; the copy stays as it was." >&2

# The page on which the lab of a hub opens; `make lab` writes it again.
(cd "$folder" && python -c "from utils.course import progress; progress.write_page()") || true
