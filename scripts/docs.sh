#!/usr/bin/env bash
# Build the documentation site into site/, from the Markdown pages of the repository. Each warning is an error: a link,
# anchor or image without its target, a page that docs/index.md does not link to. Arguments are passed to Sphinx.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

use_environment docs
cd "$repo"
rm -rf site # Sphinx keeps pages that no longer exist, and repeats no warning of an unchanged page
exec "$python" -m sphinx --quiet --fail-on-warning --keep-going -c docs -b html "$@" . site
