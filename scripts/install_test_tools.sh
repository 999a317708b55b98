#!/usr/bin/env bash
# Installs from Debian what some tests need beside Python's packages: a cross compiler and QEMU's
# user mode for the C++ kernels on ARM, Chromium and its driver for the viewer's page, PostgreSQL for
# the store. 600 MB. Without root or apt it says so and succeeds: those tests are then skipped.
set -euo pipefail
packages=()
command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null ||
    packages+=(qemu-user g++-aarch64-linux-gnu)
command -v chromium >/dev/null && command -v chromedriver >/dev/null ||
    packages+=(chromium chromium-driver fonts-dejavu-core)
command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null ||
    packages+=(postgresql)
[ ${#packages[@]} -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "some tests are skipped: they need ${packages[*]} (Debian, as root)"
    exit
fi
# No cluster of its own is made: the tests start servers in folders of theirs.
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
    echo "some tests are skipped: ${packages[*]} could not be installed"
