#!/usr/bin/env bash
# Two nodes of 8 GPUs with torchrun. Run it on each node:
#
#     NODE_RANK=0 MASTER_ADDR=node0 bash examples/launch/torchrun.sh        # on node0
#     NODE_RANK=1 MASTER_ADDR=node0 bash examples/launch/torchrun.sh        # on the other
#
# Expert-parallel groups are consecutive ranks, so EP 8 stays inside a node and EP 16 spans both.
set -euo pipefail

: "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}" "${NNODES:=2}" "${GPUS_PER_NODE:=8}"
: "${CONFIG:=configs/qwen3_30b_a3b_ep16.yaml}"

exec torchrun \
    --nnodes="$NNODES" --nproc-per-node="$GPUS_PER_NODE" \
    --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    -m lightning_ep fit --config "$CONFIG" \
    --trainer.num_nodes="$NNODES" --trainer.devices="$GPUS_PER_NODE" "$@"
