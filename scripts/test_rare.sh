#!/usr/bin/env bash
# The tests that CI leaves out: the Triton kernels in Triton's interpreter, the C++ kernels as built
# for other processors in an emulator, what verifiers refuses, whole runs on Ray that begin again,
# runs of every tracker, most trainings of the template gallery. Run it after a change there.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec bash scripts/test.sh -m rare "$@"
