#!/usr/bin/env bash
# Makes .venv-verifiers: the Python in which environments of `verifiers` run (--env verifiers). Its
# packages are of other versions than ours. A finished one is recognised by a stamp.
#   bash scripts/install_verifiers.sh [what pip takes]     e.g. ./environments/my_env, -e ./my_env
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/setup_env.sh"
home="$root/.venv-verifiers"
pins="$root/scripts/verifiers_constraints.txt"
stamp="$home/.installed"
wanted="$(cat "$pins" | cksum) $root"
if [ ! -x "$home/bin/python" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$home"
    make_venv "$home"
    say "the pinned packages of verifiers"
    pip_install "$home/bin/python" --no-compile -r "$pins"
    printf '%s' "$wanted" >"$stamp"
fi
[ $# = 0 ] || pip_install "$home/bin/python" -c "$pins" "$@"
