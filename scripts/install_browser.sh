#!/bin/bash
# Installs Debian's Chromium and its driver, for the tests of the viewer (tests/nanorl/
# test_viewer_browser.py) and its pictures (scripts/screenshots.py). Needs root; does nothing where
# both are there already.
set -euo pipefail
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core
