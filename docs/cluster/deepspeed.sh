#!/bin/bash
# The trainer with DeepSpeed's engine and DeepSpeed's own launcher, on the machines of a host file:
#
#   docs/cluster/deepspeed.sh docs/cluster/hostfile --shard 1 --optimizer adamw --seconds 600
#
# The launcher reaches the machines by pdsh and ssh without a password. Where there is no ssh (in
# containers), start this script on every machine by yourself and say which one it is:
#
#   NODE_RANK=1 docs/cluster/deepspeed.sh docs/cluster/hostfile …
#
# The engine does not care who starts it: torchrun with --engine deepspeed does the same.
set -euo pipefail

hostfile=$1
shift
head=$(awk '!/^#/ && NF {print $1; exit}' "$hostfile")
export OMP_NUM_THREADS=1

# --module: utils.train is a module; --no_local_rank: it reads LOCAL_RANK from its environment.
exec .venv/bin/deepspeed --hostfile="$hostfile" --master_addr="$head" --master_port=29500 \
    ${NODE_RANK:+--no_ssh --node_rank="$NODE_RANK"} \
    --module --no_local_rank utils.train --engine deepspeed "$@"
