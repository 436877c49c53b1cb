#!/bin/sh
# The grid behind the comparison of methods in docs/results.md: four tasks, eight methods, seeds, heads and weights.
#   benchmarks/glue.sh DATA OUTPUT [SEEDS]
# DATA holds cola, rte, mrpc and sst2 in GLUE's layout. Cells that are done are skipped, so it can be stopped and run
# again, and a row of a table is one of these lines with one method and one seed. ARGS goes to every sweep.
set -eu
data=$1 output=$2
seeds=${3:-0,1,2,3,4}

sweep() { # task, heads, methods, and what is the task's own
    task=$1 heads=$2 methods=$3
    shift 3
    # shellcheck disable=SC2086
    offramp sweep --task "$task" --data-dir "$data/$task" --output "$output/$task" --heads "$heads" --methods "$methods" \
        --seeds "$seeds" "$@" ${ARGS:-}
}

every=jt,acl-cl,2st,alt,jt+scl,ce,ce+scl,acl
sweep cola peek $every --epochs 3 --batch-size 32
sweep rte peek $every --epochs 4 --batch-size 32
sweep mrpc peek $every --epochs 3 --batch-size 32
sweep sst2 peek $every --epochs 2 --batch-size 64 --examples 8000

sweep cola mean,cls jt --epochs 3 --batch-size 32
sweep rte mean,cls jt --epochs 4 --batch-size 32
sweep mrpc mean,cls jt --epochs 3 --batch-size 32
sweep sst2 mean,cls jt --epochs 2 --batch-size 64 --examples 8000

sweep cola peek ce+scl,acl --epochs 3 --batch-size 32 --contrast-weights 0.1,0.3,0.5,0.7,0.9
sweep rte peek ce+scl,acl --epochs 4 --batch-size 32 --contrast-weights 0.1,0.3,0.5,0.7,0.9

offramp report "$output" --output "$output/report"
