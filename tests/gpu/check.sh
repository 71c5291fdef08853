#!/usr/bin/env bash
# What only a GPU can show: `tests/gpu/check.sh [PYTHON]` on a machine with one NVIDIA GPU, in under 4 minutes. Installs nothing:
# a check whose packages are missing says which (a folder that has them may be named in PYTHONPATH).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 exec timeout 240 "${1:-python3}" tests/gpu/check.py
