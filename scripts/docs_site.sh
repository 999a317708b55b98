#!/usr/bin/env bash
# The documentation as a site with search and an API reference, in build/site; broken links stop it.
#   bash scripts/docs_site.sh            builds it
#   bash scripts/docs_site.sh serve      shows it, and follows your changes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
setup_env start,docs
if [ "${1:-build}" = serve ]; then
    exec "$PYTHON" -m mkdocs serve "${@:2}"
fi
"$PYTHON" -m mkdocs build --strict --quiet "$@"
say "the site: build/site/index.html"
