#!/usr/bin/env bash
# Trains, is told to go by SIGTERM as a scheduler does it, goes on, and ends with the weights of a run that nobody disturbed:
#
#   labs/guide/preempt_and_resume.sh [keys for 'trireme train'; default: configs/production.yaml, much smaller, on the CPU]
#
# Runs go to RUNS (a scratch folder), TRIREME is the command (build/release/bin/trireme). Exit code: 0; 1 where the weights
# differ or the run did not end with 75; else that of a run that failed.
set -euo pipefail
root=$(cd "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../.." && pwd)
trireme=${TRIREME:-$root/build/release/bin/trireme}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
runs=${RUNS:-$scratch}
(($#)) || set -- -n 2 --device=cpu --model.preset=small-resnet20 --model.depth=8 --model.width=8 --model.classes=10 \
  --train.epochs=0 --train.steps=45 --train.rank_batch=4 --train.val_every=15 --train.val_batches=4 --optim.warmup_steps=5 \
  --optim.ema=0.9 --checkpoint.every=10
command=("$trireme" train "$root/configs/production.yaml" --quiet --train.deterministic=true "$@")

fail() {
  echo "preempt_and_resume.sh: $*" >&2
  exit 1
}

# digest_in RUNS: of the weights with which the newest run there ended.
digest_in() { sed -n 's/.*"weights_digest": *"\([0-9a-f]*\)".*/\1/p' "$1/latest/summary.json"; }

steps_in() { { wc -l <"$1/latest/metrics.jsonl"; } 2>/dev/null || echo 0; }

# Ends a run with SIGTERM once it has validated and gone on. Sets `code`.
preempt() {
  local process
  "${command[@]}" --run-dir "$runs/preempted" &
  process=$!
  while (($(steps_in "$runs/preempted") < 18)) && kill -0 "$process" 2>/dev/null; do sleep 0.02; done
  kill -TERM "$process" 2>/dev/null || true
  code=0
  wait "$process" || code=$?
}

"${command[@]}" --run-dir "$runs/whole"
preempt
for ((attempt = 2; code == 0 && attempt <= 5; ++attempt)); do  # it was done before the signal came
  rm -rf "$runs/preempted"
  preempt
done
((code == 75)) || fail "the run that got SIGTERM ended with exit code $code, not 75"
echo "preempted after step $(steps_in "$runs/preempted"), exit code $code"
"${command[@]}" --run-dir "$runs/preempted" --resume

whole=$(digest_in "$runs/whole") resumed=$(digest_in "$runs/preempted")
echo "weights $whole without interruption, $resumed with one"
[[ -n $whole && $whole == "$resumed" ]] || fail "the weights differ"
best=checkpoints/best/model.safetensors
cmp "$runs/whole/latest/$best" "$runs/preempted/latest/$best" || fail "the best weights differ"
echo "and the same best weights, averaged over steps"
