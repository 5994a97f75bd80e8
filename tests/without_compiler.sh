#!/usr/bin/env bash
# without_compiler.sh COMMAND...: runs a command, in /, where there is no compiler, no header and no
# copy of this repository: empty files and folders are mounted over them, for this command alone.
# Fails where the machine does not allow that.
set -euo pipefail
if [ "$1" != --in-namespace ]; then
  [ "$(id -u)" = 0 ] && user= || user=--map-root-user
  exec unshare --mount $user bash "$0" --in-namespace "$(cd "$(dirname "$0")/.." && pwd)" "$@"
fi
repository=$2
shift 2
cd /
empty=$(mktemp -d)
mkdir "$empty/folder"
touch "$empty/file"
for folder in /usr/include /usr/local/include /usr/lib/gcc /usr/libexec/gcc "$repository"; do
  [ ! -d "$folder" ] || mount --bind "$empty/folder" "$folder"
done
compiler='^(.*-)?(cc|c\+\+|gcc|g\+\+|c89|c99|clang|clang\+\+|zig)(-[0-9.]+)?$'
IFS=: read -ra folders <<<"$PATH:/usr/bin:/usr/local/bin"
for folder in "${folders[@]}"; do
  for file in "$folder"/*; do
    [[ ${file##*/} =~ $compiler && -f $file ]] || continue
    mount --bind "$empty/file" "$file"
  done
done
for name in cc c++ gcc g++ clang++; do
  if "$name" --version >/dev/null 2>&1; then
    echo "$name is still there" >&2
    exit 1
  fi
done
exec "$@"
