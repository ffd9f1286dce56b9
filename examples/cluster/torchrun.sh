#!/bin/bash
# Several machines without a queue system. Start it on each of them, with the same NODE0, NODES and RUN:
#   NODE0=node0 NODES=2 RUN=/shared/runs/first DATA=/shared/photos bash torchrun.sh
# NODE0: a name or address of the first machine that all of them reach. NODES: how many machines there are.

run=${RUN:?a run folder that all machines see}
data=${DATA:?pictures, under the same name on all machines, or shards by URL}

# A run that is there already goes on; a new one starts.
if [ -f "$run/settings.yaml" ]; then
    what=(resume "$run")
else
    what=(pretrain "$data" --recipe v2 --batch-size 512 --epochs 200 --workers 8 --out "$run")
fi

exec torchrun --nnodes="${NODES:-1}" --nproc-per-node="${GPUS:-8}" --max-restarts=3 \
    --rdzv-id=moco --rdzv-backend=c10d --rdzv-endpoint="${NODE0:-localhost}:29500" \
    -m -- moco "${what[@]}"
