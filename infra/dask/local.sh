#!/usr/bin/env bash
# A dask cluster on this machine: a scheduler and workers as processes of their own, until Ctrl-C.
#   infra/dask/local.sh [WORKERS] [PORT]
#   trajlake --lake … compact --runner dask --scheduler tcp://127.0.0.1:8786
# Workers take the credentials of the lake from the environment that this is started in.
set -euo pipefail
workers=${1:-2}
port=${2:-8786}
bin=$(dirname "$(command -v "${PYTHON:-python3}")")
command -v "$bin/dask" >/dev/null || { echo "dask is not beside $bin/python3: pip install 'trajlake[dask]'" >&2; exit 1; }

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT INT TERM
"$bin/dask" scheduler --host 127.0.0.1 --port "$port" --no-dashboard &
for _ in $(seq "$workers"); do
    # One thread a worker: a unit holds its rows in memory, and numpy and Arrow use threads of their own.
    "$bin/dask" worker "tcp://127.0.0.1:$port" --nthreads 1 --memory-limit 2GiB --no-dashboard &
done
wait
