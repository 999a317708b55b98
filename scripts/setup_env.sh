# Sourced by the other scripts: makes .venv with exactly the locked packages, once.
#   setup_env EXTRAS     e.g. setup_env start   or   setup_env dev   or   setup_env start,grammar
# A finished environment is recognised by a stamp (a hash of setup.py, constraints.txt, the locks and
# the extras), so a second call costs milliseconds. Sets PYTHON. Two variables of the caller count:
#   NANORL_PYTHON=python3.12      the Python to take; else the first of 3.11, 3.12, 3.13, python3
#   NANORL_TORCH_INDEX=ADDRESS    a package index or a folder with CPU builds of torch; without it
#                                 pip takes the index's own, with CUDA (docs/install.md)

say() { printf '\033[1m%s\033[0m\n' "$*"; }

die() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 1
}

# 3.11 to 3.13 are tested; the locks hold 3.14's packages too.
is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
    local candidate said
    if [ -n "${NANORL_PYTHON:-}" ]; then
        said="$("$NANORL_PYTHON" -c '' 2>&1)" ||
            die "NANORL_PYTHON=$NANORL_PYTHON: no such Python (${said%%$'\n'*})." \
                "Give a command on PATH (python3.12) or a path (/usr/bin/python3.12)."
        is_supported "$NANORL_PYTHON" ||
            die "NANORL_PYTHON=$NANORL_PYTHON is Python $(version_of "$NANORL_PYTHON"); 3.11 to 3.14 will do."
        command -v "$NANORL_PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python3.14; do
        command -v "$candidate" >/dev/null 2>&1 && is_supported "$candidate" || continue
        command -v "$candidate"
        return
    done
    die "no Python from 3.11 to 3.14 was found on PATH." \
        "Install one (Debian: apt-get install python3 python3-venv) and run this command again, or" \
        "name one that is elsewhere: NANORL_PYTHON=/path/to/python3.12 bash $0"
}

make_venv() { # its folder; one that is there is kept, if it is of the Python that is named
    local base
    [ ! -x "$1/bin/python" ] || [ -n "${NANORL_PYTHON:-}" ] || return 0
    base="$(find_python)" || exit 1
    if [ -x "$1/bin/python" ]; then
        [ "$(version_of "$base")" = "$(version_of "$1/bin/python")" ] && return
        die "$1 is of Python $(version_of "$1/bin/python"), NANORL_PYTHON=$NANORL_PYTHON of $(version_of "$base")." \
            "Remove that folder and run this command again, or unset NANORL_PYTHON."
    fi
    say "a virtual environment in $1 ($("$base" --version))"
    "$base" -m venv "$1" || {
        rm -rf "$1"
        die "python could not make a virtual environment." \
            "Debian: apt-get install python3-venv, then run this command again."
    }
}

setup_env() {
    local extras="$1" root stamp wanted locked=start
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    PYTHON="$root/.venv/bin/python"
    wanted="$(cat "$root/setup.py" "$root/constraints.txt" "$root"/locks/*.txt | cksum) $root"
    stamp="$root/.venv/.installed"
    make_venv "$root/.venv"
    is_stamped "$extras" && return
    # What dev installs holds all that start does.
    [[ ",$extras," != *,dev,* ]] && ! is_stamped dev || locked=dev
    is_stamped "$locked" || install_locked "$locked"
    # Extras that no lock holds, in the versions of constraints.txt.
    [ "$extras" = start ] || [ "$extras" = "$locked" ] ||
        install_packages --no-build-isolation -e "$root[$extras]"
    printf '%s' "$wanted" >"$stamp-${extras//,/-}"
}

is_stamped() { [ "$(cat "$stamp-${1//,/-}" 2>/dev/null)" = "$wanted" ]; } # extras

install_locked() { # start or dev
    say "set-up 1/3: the pinned packages of locks/$1.txt"
    install_packages --require-hashes --no-deps -r "$root/locks/build.txt"
    install_packages --require-hashes --no-deps --no-build-isolation -r "$root/locks/$1.txt"
    install_torch "$1"
    say "set-up 3/3: nanorl-stack itself"
    # setuptools warns of every editable installation.
    PYTHONWARNINGS=ignore install_packages --no-deps --no-build-isolation -e "$root"
    printf '%s' "$wanted" >"$stamp-$1"
}

# The index's torch comes by its hashes. One from elsewhere, a CPU build or one for another CUDA, is
# known by the "+" in its version; no list of ours can have its hash.
install_torch() { # the lock in use: start or dev
    local pin build source=()
    pin="$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$root/locks/torch.txt")"
    if [ -d "${NANORL_TORCH_INDEX:-}" ]; then
        source=(--find-links "$NANORL_TORCH_INDEX")
    elif [ -n "${NANORL_TORCH_INDEX:-}" ]; then
        source=(--extra-index-url "$NANORL_TORCH_INDEX")
    fi
    build="$(kept_torch "$pin")"
    [ -n "$build" ] || build="$(find_torch "$pin" ${source[@]+"${source[@]}"})"
    if [ -n "$build" ]; then
        say "set-up 2/3: torch $build, from elsewhere than the package index: its hash is not checked"
        install_packages ${source[@]+"${source[@]}"} "torch==$build"
        # Such a build brings Triton only with CUDA; the tests run it in its interpreter.
        [ "$1" = start ] || "$PYTHON" -c 'import triton' 2>/dev/null ||
            install_packages --require-hashes --no-deps -r "$root/locks/triton-3.9.0.txt"
    elif [ -n "${NANORL_TORCH_INDEX:-}" ]; then
        die "NANORL_TORCH_INDEX=$NANORL_TORCH_INDEX: no build of torch $pin for Python $(version_of "$PYTHON") on $(uname -m)." \
            "Give an index or a folder that has torch $pin+cpu (docs/install.md says where to find one), or" \
            "unset NANORL_TORCH_INDEX: the package index's own build is then taken, with CUDA: 5.2 GB of disk for all."
    else
        say "set-up 2/3: torch $pin with CUDA (2.7 GB to download; docs/install.md names a way to 0.2 GB)"
        install_packages --require-hashes --no-deps -r "$root/locks/torch.txt"
    fi
}

# One from elsewhere that is installed stays, whatever is at hand today.
kept_torch() { # the version wanted: the whole version of such a build, if any
    "$PYTHON" -m pip show torch 2>/dev/null | sed -n 's/^Version: //p' | grep "^$1+" || true
}

find_torch() { # the version wanted, pip's options: the whole version of a build from elsewhere, if any
    "$PYTHON" -m pip index versions "${@:2}" torch 2>/dev/null |
        sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' | grep -m 1 "^$1+" || true
}

install_packages() { pip_install "$PYTHON" -c "$root/constraints.txt" "$@"; }

pip_install() { # a Python, what its pip takes
    local log="${1%/bin/*}/pip.log"
    (
        set -o pipefail
        "$1" -m pip install --quiet --disable-pip-version-check "${@:2}" 2>&1 | tee "$log" >&2
    ) || explain_pip "$@"
}

explain_pip() { # as pip_install, which failed: says what is wrong, and ends
    local log="${1%/bin/*}/pip.log" what="pip could not install: ${*:2}" free
    if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
        die "$what" "A file is not the one of locks/: it was damaged, changed, or is another build."
    elif grep -qE 'No space left|Errno 28' "$log"; then
        free="$(df -h --output=avail "${log%/*}" | tail -n 1 | tr -d ' ')"
        die "$what" "The disk is full ($free are left); with torch's CUDA build an environment takes 5 GB."
    elif grep -qE 'ConnectionError|NewConnectionError|ConnectTimeout|ReadTimeout|timed out|resolve host|name resolution|Max retries|ProxyError|SSLError|CERTIFICATE' "$log"; then
        die "$what" "The package index did not answer. Check the connection and pip's own settings (pip config list)," \
            "or put the wheels into a folder: PIP_NO_INDEX=1 PIP_FIND_LINKS=that-folder bash $0"
    elif grep -qE 'ResolutionImpossible|conflict|No matching distribution' "$log"; then
        die "$what" "The index answered, but has no versions that fit together on Python $(version_of "$1"), $(uname -m)." \
            "The lines above name the package. Settings of pip that name other indexes or folders may hide a" \
            "version (pip config list); PIP_CONFIG_FILE=/dev/null leaves them out."
    fi
    die "$what" "The lines above say why."
}
