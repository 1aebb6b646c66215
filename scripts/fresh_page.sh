#!/usr/bin/env bash
# README.md's two commands to the page, word for word, in a fresh clone: they must reach it.
# Usage: scripts/fresh_page.sh [DIRECTORY]; the clone is made below it (default: a temporary one).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
clone=$(mktemp -d -p "${1:-${TMPDIR:-/tmp}}")/moaspec
git clone --quiet "$root" "$clone"
cd "$clone"
mapfile -t commands < <(sed -n '/^make install$/,/^```$/p' README.md | sed 's/ *#.*//; /^```$/d')
[ "${#commands[@]}" -eq 2 ] || { echo "README.md has ${#commands[@]} commands there" >&2; exit 1; }
echo "1: ${commands[0]}"
${commands[0]}
echo "2: ${commands[1]}"
${commands[1]} &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true; rm -rf "$(dirname "$clone")"' EXIT
for _ in $(seq 300); do
    if curl --silent --fail --max-time 5 http://127.0.0.1:8000/ | grep --quiet '<title>moaspec'; then
        echo "The page is at http://127.0.0.1:8000/."
        exit 0
    fi
    kill -0 "$server" || { echo "The server ended." >&2; exit 1; }
    sleep 1
done
echo "No page within five minutes." >&2
exit 1
