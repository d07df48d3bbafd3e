#!/usr/bin/env bash
# GiGPO against GRPO: all runs of learn.sh side by side, spread over the GPUs there are. Started again, they go on.
#
#   bash examples/smollm2/compare.sh [OVERRIDES]                      # two seeds each, 40 steps
#   LIMIT=540 SEEDS="0 1" STEPS=40 bash examples/smollm2/compare.sh   # stop after nine minutes, with checkpoints
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export WORK=${WORK:-outputs/smollm2}
ALGOS=${ALGOS:-gigpo grpo}
SEEDS=${SEEDS:-0 1}
LIMIT=${LIMIT:-36000}                      # seconds; then every run saves and stops
GPUS=${GPUS:-$( (nvidia-smi -L 2>/dev/null || true) | grep -c GPU || true)}
((GPUS > 0)) || GPUS=1

number=0
for seed in $SEEDS; do
    for algorithm in $ALGOS; do
        log=$WORK/${algorithm}_seed$seed.log
        CUDA_VISIBLE_DEVICES=$((number % GPUS)) ALGO=$algorithm SEED=$seed \
            timeout --foreground --signal=TERM --kill-after=60 "$LIMIT" \
            bash examples/smollm2/learn.sh "$@" >>"$log" 2>&1 &
        number=$((number + 1))
        sleep 2                            # so that two starts do not draw the same ports
    done
done
wait
for seed in $SEEDS; do
    for algorithm in $ALGOS; do
        lines=$(wc -l <"$WORK/${algorithm}_seed$seed/metrics.jsonl" 2>/dev/null || echo 0)
        echo "${algorithm}_seed$seed: $lines lines of metrics; the log ends:"
        tail -n 3 "$WORK/${algorithm}_seed$seed.log" | cut -c1-400
    done
done
