# Sourced: runs a command with an environment as bare as a stranger's, so that no setting of who calls
# hides what a stranger would see (with PYTHONDONTWRITEBYTECODE, say, no test meets a stale .pyc).
#   exec_bare bash .ci/run --bare
# What is left is PATH, HOME, TERM, and how the network and the package index are reached from here:
# proxies, certificates, pip's own settings, and those of scripts/setup_env.sh.

KEPT_NAMES='PATH|HOME|TERM'
KEPT_PLACES='(https?|all|no|HTTPS?|ALL|NO)_(proxy|PROXY)|SSL_CERT_(FILE|DIR)|NODE_EXTRA_CA_CERTS|GIT_SSL_CAINFO|(REQUESTS|CURL)_CA_BUNDLE'
KEPT_PIP='PIP_[A-Z0-9_]+|NANORL_(PYTHON|TORCH_INDEX)'

exec_bare() {
    local name kept=()
    while read -r name; do kept+=("$name=${!name}"); done < <(
        compgen -e | grep -xE "$KEPT_NAMES|$KEPT_PLACES|$KEPT_PIP"
    )
    exec env -i "${kept[@]}" "$@"
}
