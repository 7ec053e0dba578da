#!/usr/bin/env bash
# A Flink cluster on this machine in containers, with Beam's job server before it and a pool of Python workers.
#   infra/flink/local.sh up|down
#   trajlake --lake s3://… compact --runner flink --job-endpoint localhost:8099 --environment EXTERNAL:localhost:50000
# Needs Docker; the lake must be on S3 (the containers share no disk). Credentials go from this environment into the
# worker pool's, and nowhere else.
set -euo pipefail
cd "$(dirname "$0")"
case "${1:-up}" in
    up) exec docker compose up --detach --wait ;;
    down) exec docker compose down --volumes ;;
    *) echo "usage: $0 up|down" >&2; exit 2 ;;
esac
