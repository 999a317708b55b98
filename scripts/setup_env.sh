# Sourced by the other scripts: makes .venv with exactly the pinned packages, once.
#   setup_env [extras]     e.g. setup_env gguf   or   setup_env dev
# A finished environment is recognised by a stamp (a hash of setup.py, constraints.txt and the
# extras), so a second call costs milliseconds. Sets PYTHON.

say() { printf '\033[1m%s\033[0m\n' "$*"; }

die() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        command -v "$candidate"
        return
    done
    die "no Python 3.11 or newer found on PATH." \
        "Install one (Debian: apt-get install python3 python3-venv) and run this command again."
}

setup_env() {
    local extras="$1" root stamp wanted base
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    PYTHON="$root/.venv/bin/python"
    stamp="$root/.venv/.installed-$(printf '%s' "$extras" | tr ',' '-')"
    wanted="$(cat "$root/setup.py" "$root/constraints.txt" | cksum) $root"
    [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return

    base="$(find_python)" || exit 1
    say "set-up 1/2: a virtual environment in .venv ($("$base" --version))"
    if [ ! -x "$PYTHON" ]; then
        "$base" -m venv "$root/.venv" || {
            rm -rf "$root/.venv"
            die "python could not make a virtual environment." \
                "Debian: apt-get install python3-venv, then run this command again."
        }
    fi
    say "set-up 2/2: installing pinned packages (the largest is torch; a few minutes the first time)"
    # torch goes first and alone: a range, resolved together with other packages, may fetch another
    # build of several gigabytes.
    install_packages "$(grep '^torch==' "$root/constraints.txt")" "setuptools" "wheel"
    install_packages --no-build-isolation -e "$root[$extras]"
    printf '%s' "$wanted" >"$stamp"
}

install_packages() {
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$@" ||
        die "pip could not install: $*" \
            "The lines above name the package. Check the connection to your package index, or put the" \
            "wheels into a folder and run: PIP_FIND_LINKS=that-folder bash $0"
}
