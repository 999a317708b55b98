#!/usr/bin/env bash
# The tests that CI leaves out: the Triton kernels in Triton's interpreter, and the C++ kernels as
# built for other processors, in an emulator. Run it after a change in kernels/. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec bash scripts/test.sh -m rare tests/kernels "$@"
