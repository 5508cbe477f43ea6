#!/usr/bin/env bash
# The wheels that bench/gpu.sh needs on a machine with a GPU and no network: run this where there is a package index.
#
#     bench/gpu/wheels.sh FOLDER [PYTHON_VERSION]    the GPU machine's Python, 3.12 if it is not named
#
# Then take FOLDER along and name it: WHEELS=FOLDER bench/gpu.sh
set -eu
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
if [ $# -lt 1 ]; then sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; fi
FOLDER=$1
VERSION=${2:-3.12}
# Wheels of some packages are tagged for one of these systems alone; any Linux since 2020 has the newest.
PLATFORMS="--platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any"
# shellcheck disable=SC2086 - a list of options
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: $PLATFORMS --implementation cp \
    --python-version "$VERSION" --dest "$FOLDER" -c "$ROOT/constraints.txt" -r "$ROOT/bench/gpu/requirements.in"
du -sh "$FOLDER"
