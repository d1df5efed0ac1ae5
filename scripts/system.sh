#!/usr/bin/env bash
# The parts of the full environment that come from apt: redis-server, so that the ledger is tested on Redis 7 beside the
# embedded Valkey; a Docker engine, for which the tests start a daemon of their own on an image from local files; and the
# library that makes seccomp filters. `make test` calls it. Installs only as root and only what is missing, and starts no
# service.
set -euo pipefail

# What must be there: a program, or a library of the dynamic linker, and the package that brings it.
programs=(redis-server:redis-server dockerd:docker.io runc:runc containerd:containerd iptables:iptables
  busybox:busybox-static)
libraries=(libseccomp.so.2:libseccomp2)
PATH=$PATH:/usr/sbin:/sbin

missing() {
  local entry
  for entry in "${programs[@]}"; do
    command -v "${entry%%:*}" >/dev/null || echo "${entry##*:}"
  done
  for entry in "${libraries[@]}"; do
    ldconfig -p | grep -F "${entry%%:*}" >/dev/null || echo "${entry##*:}"
  done
}

mapfile -t packages < <(missing)
if [[ ${#packages[@]} == 0 ]]; then
  exit 0
fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "headrace: some tests need what is missing here: apt-get install ${packages[*]}" >&2
  # A laptop goes on without them; CI does not.
  [[ ${CI:-} != true ]]
  exit
fi

# A policy that forbids starts keeps the packages from running system-wide servers.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}
echo "Installing ${packages[*]}"
install 2>/dev/null || { apt-get update -qq && install; }
mapfile -t packages < <(missing)
if [[ ${#packages[@]} != 0 ]]; then
  echo "headrace: still missing after the installation: ${packages[*]}" >&2
  exit 1
fi
