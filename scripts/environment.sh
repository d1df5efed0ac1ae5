#!/usr/bin/env bash
# Makes .venv hold what requirements/NAME.txt lists, and headrace itself as an editable install.
#   scripts/environment.sh demo|full
# PYTHON chooses the interpreter (3.11 to 3.13). A second call does nothing: a stamp in .venv names the lock files, the
# pyproject.toml and the folder that it was made from. A full environment serves the demo too.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?usage: scripts/environment.sh demo|full}
lock=requirements/$kind.txt
venv=.venv

stamp() { echo "$venv/.headrace-$1-$(cat "requirements/$1.txt" pyproject.toml <(pwd) | sha256sum | cut -c1-16)"; }
fail() { echo "headrace: $*" >&2; exit 1; }

[[ -e $lock ]] || fail "there is no $lock; give demo or full"
if [[ -e $(stamp "$kind") ]] || { [[ $kind == demo ]] && [[ -e $(stamp full) ]]; }; then
  exit 0
fi

[[ $(uname -sm) == "Linux x86_64" ]] || fail "the locked packages are for Linux on x86-64; this is $(uname -sm)"
candidates=(python3.11 python3 python3.12 python3.13)
[[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
python=
for candidate in "${candidates[@]}"; do
  version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  case $version in 3.11 | 3.12 | 3.13) python=$candidate && break ;; esac
done
[[ -n $python ]] ||
  fail "Python 3.11, 3.12 or 3.13 is needed; of ${candidates[*]} none is. Name one: make PYTHON=/path/to/python3.11 …"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "$python cannot make virtual environments; on Debian or Ubuntu install python$version-venv"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "Making $venv with Python $version"
  "$python" -m venv --clear "$venv"
fi
rm -f "$venv"/.headrace-*

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
count=$(grep -c == "$lock")
echo "Installing $count packages into $venv (the first time takes a few minutes)"
# torch with its own dependencies, at the locked versions: its builds for GPUs need more than the lock lists.
pip install -qq -c "$lock" "$(grep '^torch==' "$lock")"
pip install -qq --no-deps -r "$lock"
pip install -qq --no-deps --no-build-isolation -e .
touch "$(stamp "$kind")"
