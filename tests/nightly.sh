#!/usr/bin/env bash
# nightly.sh [PART ...]: all that tests/run.sh leaves out, or these parts of it; hours. Needs .venv with
# the test extra, and root for hosts. Each part has a log in build/nightly; its last line says how it ended.
set -uo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
seed=${SEED:-$(date +%j)}
all=(zoo hosts suite open fuzz graphs sanitizers garbage wheels openvino matrix)

zoo() { # whole models, and all cases of tests marked as a matrix or slow
  pytest -q -n 2 --dist loadscope --zoo --ignore tests/hosts --ignore tests/test_wheels.py \
    --deselect tests/native/test_sanitizers.py
}
hosts() { pytest -q --zoo tests/hosts; }
suite() { python tests/peer/run.py; }
open() { # the same cases, with open sizes; all would take a core 20 hours, so each night has a sample
  python tests/peer/run.py --open --sample $((10#$seed % 20 + 1))/20
}
fuzz() {
  python tests/fuzz/run.py --models 20000 --configurations 20000 --folders 20000 --seed "$seed" --keep build/nightly/found
}
graphs() { pytest -q --random-graphs 20000 tests/whole_models/test_random_graphs.py; }
sanitizers() { pytest -q --zoo tests/native/test_sanitizers.py; }
garbage() { # what malloc returns is full of large numbers, so that a kernel that does not write is seen
  MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_PERTURB_=90 pytest -q -n 2 tests/rules tests/lowering
}
openvino() { tests/openvino.sh; }
wheels() { pytest -q --zoo tests/test_wheels.py; }
matrix() { python tests/training/matrix.py; }

parts=("${@:-${all[@]}}")
for part in "${parts[@]}"; do
  [[ " ${all[*]} " == *" $part "* ]] || { echo "no part $part; there are: ${all[*]}" >&2; exit 2; }
done
mkdir -p build/nightly
lines=() failed=0
for i in "${!parts[@]}"; do
  part=${parts[i]} log=build/nightly/${parts[i]}.log began=$SECONDS status=0
  echo "[$((i + 1)) of ${#parts[@]}] $part ... (tail -f $log)"
  "$part" >"$log" 2>&1 </dev/null || status=$?
  [ $status = 0 ] && ended=passed || { ended="failed ($status)" && failed=$((failed + 1)); }
  lines+=("$(printf '%-11s %-11s %6d s  %s' "$part" "$ended" $((SECONDS - began)) "$(grep -v '^\s*$' "$log" | tail -n 1)")")
  echo "${lines[-1]}"
done
printf '\n'
printf '%s\n' "${lines[@]}"
echo "all: $((${#parts[@]} - failed)) passed, $failed failed; $SECONDS s; seed $seed"
[ $failed = 0 ]
