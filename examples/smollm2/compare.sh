#!/usr/bin/env bash
# GiGPO against GRPO: all runs of learn.sh side by side, spread over the GPUs there are. Started again, they go on. The
# exit code is the number of runs that failed, 64 if a value below is wrong.
#
#   bash examples/smollm2/compare.sh [OVERRIDES]                      # two seeds each, 40 steps
#   LIMIT=540 SEEDS="0 1" STEPS=40 bash examples/smollm2/compare.sh   # stop after nine minutes, with checkpoints
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export WORK=${WORK:-outputs/smollm2}
ALGOS=${ALGOS:-gigpo grpo}
SEEDS=${SEEDS:-0 1}
LIMIT=${LIMIT:-36000}                      # seconds; then every run saves and stops
GPUS=${GPUS:-$( (nvidia-smi -L 2>/dev/null || true) | grep -c GPU || true)}
refuse() {
    echo "compare.sh: $1" >&2
    exit 64
}
[[ $GPUS =~ ^[0-9]+$ ]] || refuse "GPUS=$GPUS has to be a whole number"
[[ $LIMIT =~ ^[1-9][0-9]*$ ]] || refuse "LIMIT=$LIMIT has to be a whole number of seconds, at least 1"
[[ $ALGOS =~ [^[:space:]] && $SEEDS =~ [^[:space:]] ]] || refuse "ALGOS=$ALGOS with SEEDS=$SEEDS is no run"
[[ -z $(tr -s '[:space:]' '\n' <<<"$SEEDS" | sort | uniq -d) ]] || refuse "SEEDS=$SEEDS has one of them twice"
((10#$GPUS > 0)) || GPUS=1
GPUS=$((10#$GPUS))
mkdir -p "$WORK" || refuse "WORK=$WORK has to be a folder that can be written to"

started=()
ended() {  # the runs end with the script; each saves what it has
    ((${#started[@]} == 0)) || kill "${started[@]}" 2>/dev/null || true
    wait
    exit "$1"
}
trap 'ended 143' TERM
trap 'ended 130' INT
trap 'ended 129' HUP
number=0
for seed in $SEEDS; do
    for algorithm in $ALGOS; do
        log=$WORK/${algorithm}_seed$seed.log
        CUDA_VISIBLE_DEVICES=$((number % GPUS)) ALGO=$algorithm SEED=$seed \
            timeout --foreground --signal=TERM --kill-after=60 "$LIMIT" \
            bash examples/smollm2/learn.sh "$@" >>"$log" 2>&1 &
        started[number]=$!
        number=$((number + 1))
        sleep 2                            # so that two starts do not draw the same ports
    done
done

failed=0
number=0
for seed in $SEEDS; do
    for algorithm in $ALGOS; do
        run=$WORK/${algorithm}_seed$seed code=0
        wait "${started[number]}" || code=$?
        number=$((number + 1))
        lines=$( (cat "$run/metrics.jsonl" 2>/dev/null || true) | wc -l)
        case $code in
            0) how="ended" ;;
            124 | 143) how="stopped at LIMIT; the same command goes on" ;;
            *) how="failed with exit code $code" failed=$((failed + 1)) ;;
        esac
        echo "${algorithm}_seed$seed $how, $lines lines of metrics; the log ends:"
        tail -n 3 "$run.log" | cut -c1-400
    done
done
exit "$failed"
