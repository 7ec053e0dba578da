#!/usr/bin/env bash
# Makes the virtual environment at $1 with interpreter $2, with the extras $3 (dev). Installs what a bare Debian lacks when it may.
set -euo pipefail
venv=$1
python=$2
extras=${3:-dev}
size="850 MB"
[[ $extras = *torch* ]] && size="7 GB with what PyTorch brings for CUDA, less on macOS"

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

usable() { "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# What pip does, in one line that is rewritten on a terminal, and one line a phase elsewhere.
in_one_line() {
    local line what phase downloads=0 packages
    while IFS= read -r line; do
        phase=
        case $line in
            *"Downloading "*)
                downloads=$((downloads + 1))
                what="downloading, package $downloads: ${line#*Downloading }"
                [ "$downloads" = 1 ] && phase="downloading packages" ;;
            "Installing collected packages: "*)
                packages=${line//[!,]/}
                what="installing $((${#packages} + 1)) packages"
                phase=$what ;;
            *) continue ;;
        esac
        if [ -t 1 ]; then printf '\r\033[K  %.76s' "$what"; elif [ -n "$phase" ]; then echo "  $phase"; fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
}

if command -v uv >/dev/null; then
    echo "installing packages into $venv (about $size; half a minute the first time)"
    uv venv --quiet --allow-existing --python '>=3.11' "$venv"
    VIRTUAL_ENV="$venv" uv pip install --quiet -e ".[$extras]"
    exit 0
fi
if ! usable; then
    command -v apt-get >/dev/null || { echo "Python 3.11 or newer with venv is needed: install it, or call make PYTHON=…" >&2; exit 1; }
    echo "installing python3 and python3-venv"
    as_root apt-get update -qq
    as_root apt-get install -y -qq python3 python3-venv >/dev/null
    usable || { echo "this system's python3 is older than 3.11: call make PYTHON=/path/to/a/newer/python3" >&2; exit 1; }
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing packages into $venv (about $size; a minute or two the first time)"
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -e ".[$extras]" | in_one_line
echo "ready after $SECONDS s: . $venv/bin/activate, or call $venv/bin/trajlake"
