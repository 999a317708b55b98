#!/usr/bin/env bash
# Installs what the tests of the C++ kernels on ARM need: a cross compiler and QEMU's user mode, 150
# MB from Debian. Without root or apt it says so and succeeds: those tests are then skipped.
set -euo pipefail
packages=(qemu-user g++-aarch64-linux-gnu)
command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null && exit
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "the kernels' tests on ARM are skipped: they need ${packages[*]} (Debian, as root)"
    exit
fi
apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
    echo "the kernels' tests on ARM are skipped: ${packages[*]} could not be installed"
