#!/usr/bin/env bash
# The tests as most laptops run them: the C++ kernels are built for a processor with AVX2 and without
# AVX-512, and PyTorch keeps to AVX2, on a machine that has more. Arguments go to pytest; without any
# they are the tests of the kernels and of both engines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
grep -qw avx2 /proc/cpuinfo || die "this processor has no AVX2." "Run scripts/test.sh instead."
[ $# -gt 0 ] || set -- tests/kernels tests/nanoengine tests/nanoinfer -m "not rare"

# Kernels are kept below HOME, by a name that does not tell whom they were built for: they get a HOME
# of their own, with the models of the real one.
temporary="$(mktemp -d)"
trap 'rm -rf "$temporary"' EXIT
mkdir -p "$temporary/bin" "$temporary/.cache/nanorl"
for kept in ~/.cache/nanorl/*; do
    [ ! -e "$kept" ] || [ "${kept##*/}" = kernels ] || ln -s "$kept" "$temporary/.cache/nanorl/"
done
for name in g++ clang++ c++; do
    compiler="$(command -v "$name")" || continue
    printf '#!/usr/bin/env bash\nexec %q "${@/#-march=native/-march=haswell}"\n' "$compiler" \
        >"$temporary/bin/$name"
    chmod +x "$temporary/bin/$name"
done
say "kernels built for AVX2"
HOME="$temporary" PATH="$temporary/bin:$PATH" ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
    bash scripts/test.sh "$@"
