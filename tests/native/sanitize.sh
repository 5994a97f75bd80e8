#!/usr/bin/env bash
# sanitize.sh address|thread [pytest arguments]: runs tests/native with a plugin that checks itself,
# AddressSanitizer with UndefinedBehaviorSanitizer, or ThreadSanitizer, in a copy of the package.
# Prints the reports that name our code, and fails where there are any.
set -euo pipefail
kind=$1
shift
cd "$(dirname "$0")/../.."
source=$PWD python=${PYTHON:-$PWD/.venv/bin/python}
case $kind in
  address) flags="-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined" library=libasan.so ;;
  thread) flags="-fsanitize=thread" library=libtsan.so ;;
  *) echo "address or thread, not '$kind'" >&2; exit 2 ;;
esac
build=$source/build/sanitize-$kind
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS="$flags -fno-omit-frame-pointer" >/dev/null
cmake --build "$build" -j 2 >/dev/null

reports=$build/reports packages=$build/packages
rm -rf "$reports" "$packages" && mkdir -p "$reports" "$packages"
cp -rL onnxpar "$packages"
cp "$build/libonnxpar_ops.so" "$packages/onnxpar/native/"
export PYTHONPATH=$packages

# Python and onnxruntime leak at their end, as do threads of worlds that end with the process: what
# counts is whose code a report names, not how a process ends.
export ASAN_OPTIONS=detect_leaks=1:log_path=$reports/address:exitcode=0
export LSAN_OPTIONS=exitcode=0:max_leaks=1000
export UBSAN_OPTIONS=print_stacktrace=1:log_path=$reports/undefined
export TSAN_OPTIONS=report_thread_leaks=0:ignore_noninstrumented_modules=1:die_after_fork=0:exitcode=0:log_path=$reports/thread:suppressions=$source/tests/native/thread_suppressions.txt
status=0
cd "$packages" # what Python finds first
LD_PRELOAD="$(gcc -print-file-name=$library) $(gcc -print-file-name=libstdc++.so.6)" PYTHONMALLOC=malloc \
  setarch -R "$python" -m pytest -q -p no:cacheprovider -c "$source/pyproject.toml" "$source/tests/native" "$@" || status=$?

"$python" - "$reports" <<'END' || status=1
import re, sys
from pathlib import Path

ours: dict[str, int] = {}
for file in Path(sys.argv[1]).iterdir():
    text = file.read_text(errors="replace")
    for report in re.split(r"\n(?=(?:Direct|Indirect) leak|==\d+==ERROR|WARNING: Thread|\S+: runtime)", text):
        if report.startswith("Indirect leak"):  # of what Python and onnxruntime hold
            continue
        if "libonnxpar_ops.so" in report or "onnxpar/native/" in report:
            alike = re.sub(r"0x[0-9a-f]+|\b\d+\b", "N", report)
            ours[alike] = ours.get(alike, 0) + 1
print(f"{sum(ours.values())} reports name the plugin, {len(ours)} different ones")
for report, count in list(ours.items())[:20]:
    print(f"--- {count} times\n{report}")
sys.exit(bool(ours))
END
exit $status
