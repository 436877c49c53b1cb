#!/bin/sh
# One text, one promise: the same answer as the whole network in at least 99 % of cases, for as little work as that takes.
set -eu
url=${OFFRAMP_URL:-http://localhost:8000}
curl --silent --show-error --fail-with-body "$url/classify" -H 'content-type: application/json' -d '{
  "inputs": "a gripping film that never lets go", "quality": 0.99}'
echo
