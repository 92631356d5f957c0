#!/bin/bash
# The trainer on several machines that you reach by ssh, without a scheduler. On one of them:
#
#   docs/cluster/hosts.sh docs/cluster/hostfile --tp 8 --pp 2 --batch 512 --seconds 600
#
# The first argument is a host file as DeepSpeed reads it, one machine a line: NAME slots=RANKS.
# The workshop lies in the same folder on all of them, with its .venv. Ctrl-C ends all.
set -euo pipefail

hostfile=$1
shift
mapfile -t hosts < <(awk '!/^#/ && NF {print $1}' "$hostfile")
ranks=$(awk '!/^#/ && NF {sub("slots=", "", $2); print $2; exit}' "$hostfile")

# The same line for every machine; they meet at the first one, through port 29500.
line="cd $(printf %q "$PWD") && OMP_NUM_THREADS=1 .venv/bin/torchrun \
--nnodes=${#hosts[@]} --nproc-per-node=$ranks \
--rdzv-backend=c10d --rdzv-endpoint=${hosts[0]}:29500 --rdzv-id=1 \
-m utils.train$(printf ' %q' "$@")"

# -tt: a terminal, so that the run on the other side ends when the connection does.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for host in "${hosts[@]}"; do
    ssh -tt "$host" "$line" </dev/null &
done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
