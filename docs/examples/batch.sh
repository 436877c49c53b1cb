#!/bin/sh
# A file of texts without a server: one text a line in, one JSON answer a line out.
set -eu
offramp=${OFFRAMP:-offramp}
printf '%s\n' "a gripping film that never lets go" "two hours that i will never get back" |
  "$offramp" classify ${OFFRAMP_BUNDLE:+--bundle "$OFFRAMP_BUNDLE"} --speed 2 --json -
