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
    base="$(find_python)" || exit 1
    say "a virtual environment in $home ($("$base" --version)), with the pinned packages"
    "$base" -m venv "$home" || die "python could not make a virtual environment." \
        "Debian: apt-get install python3-venv, then run this command again."
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r "$pins" ||
        die "pip could not install verifiers." "Check the connection to your package index."
    printf '%s' "$wanted" >"$stamp"
fi
[ $# = 0 ] ||
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check -c "$pins" "$@" ||
    die "pip could not install: $*" "The lines above name the package; those of verifiers are pinned" \
        "in scripts/verifiers_constraints.txt."
