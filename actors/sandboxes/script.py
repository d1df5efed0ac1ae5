"""What runs inside of a box: a shell that starts, watches and ends another shell.

The outer one, the first process of the box where it has processes of its own, runs nothing that an agent wrote: it
survives whatever a command does, ends what a command started, and begins a new inner shell where the last one stopped.
The inner one evaluates the commands, one after the other, so that a command costs no process of its own.

It is written for bash, dash and busybox's ash, and starts no program on the way of a command.

Messages come on standard input, lines of text:
  `start TOKEN LIFE COUNT KEEP…`  end all processes but KEEP (/proc/PID…; `all` ends none) and those below them, and
                                  begin an inner shell, which first evaluates the COUNT lines that follow. `host` ends
                                  none either, and none are listed from now on: the host sees them by itself
  `ID|COUNT|TEXT`                 evaluate TEXT, or the COUNT lines that follow where that is not 0 (read by the inner
                                  shell)
Standard output carries what commands print, and `NUL TOKEN ID NUL` where the output of one ends. Standard error, which
commands do not have, carries the answers, each of fields that end in NUL:
  `H`                             the outer shell listens
  EXPORTS, `R LIFE LEFT PIDS`, DIRECTORY
                                  the inner shell is ready; LEFT is 1 when a process would not end. PIDS are those there
  EXPORTS, `E ID CODE PIDS`, DIRECTORY
                                  a command has ended
  nothing, `D LIFE CODE HIT`      the inner shell is gone (its output ends with the id `-LIFE`); HIT is 1 after SIGUSR1,
                                  which asks the outer shell to kill it
An answer is written before the end of the output that it belongs to, so that who waits for that has both.
"""

from pathlib import Path

_BEGIN = r"""
PATH=/usr/local/bin:/usr/bin:/bin
_nl='
'
exec 7<&0 8>&2 9>&1 >/dev/null 2>&1
"""
_ENDING = r"""
_list() { set -- /proc/[0-9]*; _pids="$*"; }
_state() {  # all lines: the name in it may have several
  _stat=
  while _part=; IFS= read -r _part || [ "$_part" ]; do _stat="$_stat $_part"; done < "$1/stat"
  _stat=${_stat##*) }
}
_kept() {
  while [ "$1" -gt 1 ] && [ "$1" != $$ ]; do
    case "$_keep" in *" /proc/$1 "*) return 0;; esac
    _state "/proc/$1"; set -- $_stat; [ "$2" ] || return 1
    shift
  done
  return 1
}
_signal() {
  _left=; _phase=$1; _list
  for _p in $_pids; do
    _state "$_p"; _how=$_phase
    case "$_stat" in
      '' | X*) continue;;
      Z*) set -- "$_p"/task/*; [ $# -gt 1 ] || continue; _how=KILL;;  # a first thread may end before the others
      T*) [ $_phase = STOP ] && continue;;
    esac
    _p=${_p#/proc/}
    if [ "$_p" = $$ ] || _kept "$_p"; then continue; fi
    _left=1; kill "-$_how" "$_p"
  done
}
_end() {
  for _sig in STOP KILL; do
    _pass=0
    while _signal $_sig; [ "$_left" ] && [ $_pass -lt 300 ]; do
      _pass=$((_pass + 1)); [ $_pass -lt 5 ] || sleep 0.01
    done
  done
}
"""
_REST = r"""
_host=; _pids=
_lines() {
  _text=; _k=$1
  while [ "$_k" -gt 0 ]; do
    IFS= read -r _line || exit; _text="$_text$_line$_nl"; _k=$((_k - 1))
  done
}
_report() {
  set +efuvx
  [ "$_host" ] || { IFS=" $_nl"; _list; }
  { export -p; printf '\0%s %s %s %s\0%s\0' "$1" "$2" "$3" "$_pids" "$PWD"; } >&8
  printf '\0%s %s\0' "$_token" "$2" >&9
}
_main() {
  eval "$_text"
  _report R "$_life" "${_left:-0}"
  while IFS='|' read -r _id _count _text; do
    [ "$_count" = 0 ] || _lines "$_count"
    eval "$_text" </dev/null >&9 2>&9 8>&- 9>&-
    _report E "$_id" "$?"
  done
}
_hit=; trap '_hit=1' USR1
printf 'H\0' >&8
while :; do
  _verb=; IFS=' ' read -r _verb _token _life _count _keep || [ "$_hit" ] || exit
  _hit=; [ "$_verb" = start ] || continue
  _left=; _keep=" $_keep "
  case "$_keep" in
    ' all ') ;;
    ' host ') _host=1;;
    *) _end;;
  esac
  _lines "$_count"
  set -m; _main <&7 7<&- & _child=$!; set +m
  while :; do
    [ "$_hit" ] || wait "$_child"
    _code=$?
    if [ "$_hit" ]; then kill -KILL "$_child"; wait "$_child"; break; fi
    kill -0 "$_child" || break
  done
  printf '\0D %s %s %s\0' "$_life" "$_code" "$_hit" >&8
  printf '\0%s %s\0' "$_token" "-$_life" >&9
done
"""


def best_shell() -> str:
    """The path of bash where this host has it, else of its plain shell."""
    return next((shell for shell in ("/bin/bash", "/usr/bin/bash") if Path(shell).exists()), "/bin/sh")


def shell_argv(shell: str, host: bool) -> list[str]:
    """How to start it: `shell` is a path in the box. `host`: the host sees and ends what runs in the box, and each
    `start` will say so; it has to be the one to whom orphans fall. Else /proc has to show the box's processes only."""
    options = ["--norc", "--noprofile"] if shell.endswith("bash") else []
    return [shell, *options, "-c", _BEGIN + ("" if host else _ENDING) + _REST, "sh"]
