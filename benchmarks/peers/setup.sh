#!/bin/sh
# Makes an environment for each peer that has dependencies of its own: setup.sh [FOLDER], default .venv-bench beside
# pyproject.toml. FastAPI and the bare loop run in Offramp's own environment, with the same ONNX Runtime. wrk: Debian's.
set -eu
folder=${1:-$(dirname "$0")/../../.venv-bench}
python=${PYTHON:-python3}
torch='torch==2.13.0'

peer() { # NAME REQUIREMENT...
  name=$1
  shift
  if [ ! -x "$folder/bench-$name/bin/python" ]; then
    "$python" -m venv "$folder/bench-$name"
  fi
  echo "Installing $name into $folder/bench-$name ..."
  "$folder/bench-$name/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" "$@"
}

peer infinity 'infinity-emb[server,torch]==0.0.78'
peer litserve 'litserve==0.2.19' 'transformers>=5,<6'
