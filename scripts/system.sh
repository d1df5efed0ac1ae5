#!/usr/bin/env bash
# The parts of the full environment that come from apt: redis-server, so that the ledger is tested on Redis 7 beside the
# embedded Valkey. `make test` calls it. Installs only as root and only what is missing, and starts no service.
set -euo pipefail

if command -v redis-server >/dev/null; then
  exit 0
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "headrace: redis-server is missing; the ledger's tests on Redis need it: apt-get install redis-server" >&2
  # A laptop goes on without it; CI does not.
  [[ ${CI:-} != true ]]
  exit
fi

# A policy that forbids starts keeps the package from running a system-wide server.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >/dev/null
}
echo "Installing redis-server"
install 2>/dev/null || { apt-get update -qq && install; }
command -v redis-server >/dev/null
