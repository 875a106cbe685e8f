#!/usr/bin/env bash
# Copies Debian's prometheus and promtool into DIR without installing them: get_prometheus.sh DIR
set -euo pipefail
directory=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
if ! apt-get download -qq prometheus 2> /dev/null; then
    apt-get update -qq  # a fresh container has no package lists; this command needs root
    apt-get download -qq prometheus
fi
dpkg-deb -x prometheus_*.deb .
cp usr/bin/prometheus usr/bin/promtool "$directory"
