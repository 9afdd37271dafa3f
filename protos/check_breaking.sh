#!/usr/bin/env bash
# Compares the protos with those of the main branch; BUF names the buf command. Run it from the repository root.
set -euo pipefail

buf=${BUF:-buf}
for branch in origin/main main; do
    if git rev-parse --quiet --verify "$branch^{commit}" > /dev/null 2>&1 &&
        git cat-file -e "$branch:protos/buf.yaml" 2> /dev/null; then
        before=$(mktemp -d)
        trap 'rm -rf "$before"' EXIT
        git archive "$branch" protos | tar -x -C "$before"
        "$buf" breaking protos --against "$before/protos"
        echo "the protos break nothing of $branch"
        exit 0
    fi
done
echo "no main branch with protos to compare with: this is the first version"
