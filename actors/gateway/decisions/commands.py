"""Which programs a command line starts, and whether they may.

Every program that is named anywhere in it counts: behind separators, in substitutions, groups and loops, behind
`env`, `xargs`, `find -exec` and others that start what they are told to, and in what `sh -c` and `eval` are given. An
assignment of X counts as a program `X=`, for it can change what the others do. With a list of allowed programs, what
cannot be read is refused.

A list of allowed programs is as tight as its loosest entry: an interpreter, or a program that starts others by options
of its own (`git -c`, `awk`, `tar`), may start anything. A list of denied ones stops mistakes, not intent; what holds an
agent is the sandbox.
"""

import re
from dataclasses import dataclass, field

from headrace.actors.gateway.decisions.patterns import Patterns
from headrace.actors.gateway.decisions.shell_words import Line, Unreadable, Word, read_line

_MOST_CHARS = 65536
_DEEPEST = 4
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=")
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish"))
_EVALUATE = frozenset(("eval", "trap"))
_PREFIX = re.compile(
    "env|xargs|nohup|nice|ionice|timeout|time|sudo|doas|stdbuf|setsid|exec|command|builtin|watch|strace|ltrace|chroot"
    "|unshare|nsenter|flock|parallel|busybox|toybox|chrt|taskset|setarch|script|su|runuser|systemd-run|catchsegv"
)
"""Programs that start the program that is named after their options."""
_EXECUTE = frozenset(("-exec", "-execdir", "-ok", "-okdir"))
_OPENING = frozenset(("if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"))
_CLOSING = frozenset(("fi", "done", "}", "esac"))
_INTRICATE = frozenset(("case", "select", "function", "coproc"))
_SYSTEM = ("/bin/", "/usr/bin/", "/sbin/", "/usr/sbin/")
_FLAGS = frozenset(("--", "-0", "-r", "-t", "-i", "-p", "-x", "-v", "--null", "--no-run-if-empty"))
"""Options of prefixes that take no word after them."""
_VALUE = re.compile(r"-.*|\d[\d.]*[smhdKMG]?|\{\}|--")
"""Words between a prefix and its program: options and the numbers that belong to them."""


@dataclass(slots=True)
class Programs:
    """Those that a command line starts, as they are named there, and words that `may` name some.

    `unsure` says why there may be others: "unread" for what cannot be read, "dynamic" for names that only exist when it
    runs.
    """

    names: list[str] = field(default_factory=list)
    may: list[str] = field(default_factory=list)
    unsure: str = ""
    told: str = ""

    def doubt(self, kind: str, told: str) -> None:
        """There may be others. The first doubt stays, but for a name that only exists when it runs."""
        if not self.unsure or kind == "dynamic":
            self.unsure, self.told = kind, told


def programs_of(command: str) -> Programs:
    """The programs that a command line starts."""
    programs = Programs()
    _collect(command, programs, 0)
    return programs


def command_problem(command: str, allow: Patterns, deny: Patterns) -> str:
    """Why a command line may not run, for the model; empty where it may."""
    if not allow and not deny:
        return ""
    if len(command) > _MOST_CHARS:
        return f"a command has at most {_MOST_CHARS} characters here"
    programs = programs_of(command)
    for name in programs.names:
        if base(name) in deny or (allow and not _is_listed(name, allow)):
            only = f"; only {', '.join(allow[:20])}" if allow else ""
            return f"{name:.60} may not be run{only}"
    if deny and (denied := next((word for word in programs.may if base(word) in deny), "")):
        return f"{denied:.60} may not be run"
    if programs.unsure == "dynamic" or (programs.unsure and (allow or _mentions(command, deny))):
        return f"the command cannot be allowed: {programs.told}; write it in a simpler way"
    return ""


def base(name: str) -> str:
    """A program's name without the folder that it lies in."""
    return name.rpartition("/")[2]


def _is_listed(name: str, allow: Patterns) -> bool:
    """A path has to be listed as it is, unless it is one of the system's own."""
    if name in allow:
        return True
    return any(name.startswith(folder) and name[len(folder) :] in allow for folder in _SYSTEM)


def _mentions(command: str, names: Patterns) -> bool:
    plain = re.sub(r"[\\'\"]", "", command)
    return any(name in plain for name in names)


def _collect(command: str, programs: Programs, depth: int) -> None:
    if depth > _DEEPEST:
        programs.doubt("unread", "it is nested too deeply")
        return
    try:
        line: Line = read_line(command)
    except Unreadable as error:
        programs.doubt("unread", str(error))
        return
    if line.defines:
        programs.doubt("unread", "it has round brackets behind a word, as of a function")
    for words in line.commands:
        _simple(words, programs, depth)


def _simple(words: list[Word], programs: Programs, depth: int) -> None:
    """One simple command: keywords and assignments first, then its program."""
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        if not word.is_quoted and word.text in _OPENING | _CLOSING:
            continue
        if not word.is_quoted and word.text in _INTRICATE:
            programs.doubt("unread", f"it has `{word.text}` in it")
            return
        if not word.is_quoted and word.text == "for":
            if rest and not rest[0].text.islower():  # a variable that other programs may look at, such as PATH
                programs.names.append(f"{rest[0].text}=")
            body = next((at for at, each in enumerate(rest) if each.text == "do"), len(rest))
            _simple(rest[body + 1 :], programs, depth)
            return
        if assignment := _ASSIGNMENT.match(word.text):
            programs.names.append(f"{assignment.group(1)}=")
            continue
        if not word.is_fixed and word.text not in ("[", "[["):
            programs.doubt("dynamic", "which program it starts is only known when it runs")
            return
        programs.names.append(word.text)
        _started_by(base(word.text), rest, programs, depth)
        return


def _started_by(program: str, words: list[Word], programs: Programs, depth: int) -> None:
    """What a program is told to start."""
    if _PREFIX.fullmatch(program):
        programs.may += [word.text for word in words]
        _simple(_behind_options(words, programs), programs, depth)
    if program in _SHELLS or program in ("su", "runuser", "script", "watch", "flock"):
        for index, word in enumerate(words):
            if re.fullmatch(r"-[A-Za-z]*c|--command", word.text):
                _evaluate(words[index + 1 : index + 2], programs, depth)
    elif program in _EVALUATE:
        _evaluate(words, programs, depth)
    elif program == "find":
        for index, word in enumerate(words):
            if word.text in _EXECUTE:
                _simple(words[index + 1 :], programs, depth)


def _behind_options(words: list[Word], programs: Programs) -> list[Word]:
    before = ""
    for index, word in enumerate(words):
        if word.is_fixed and _VALUE.fullmatch(word.text):
            before = word.text
            if word.text.startswith(("-S", "--split-string")):
                programs.doubt("dynamic", "env -S starts what it takes apart itself")
            continue
        if before.startswith("-") and "=" not in before and before not in _FLAGS:
            programs.doubt("unread", f"{word.text:.40} may belong to {before:.40}, or be what is started")
        return words[index:]
    return []


def _evaluate(words: list[Word], programs: Programs, depth: int) -> None:
    if any(not word.is_fixed for word in words):
        programs.doubt("dynamic", "what it evaluates is only known when it runs")
        return
    _collect(" ".join(word.text for word in words), programs, depth + 1)
