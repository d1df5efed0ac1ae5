"""A command line as a shell reads it, as far as it says which programs it starts.

Knows words with their quotes, separators, redirections, here-documents, groups, and substitutions, which it reads as
command lines of their own. What a word becomes only when it runs (`$X`, `*`, `$'…'`) is told apart from what it says.
Owns no opinion on programs; see `commands`.
"""

import re
from dataclasses import dataclass, field

_DEEPEST = 8
_SIMPLE = re.compile(r"[\w \t\n./:,@+%^=-]*(?:(?:&&|\|\|?|;)[\w \t\n./:,@+%^=-]+)*", re.ASCII)
"""A command line without quotes, and without signs that mean anything but "and then"."""
_JOINED = re.compile(r"&&|\|\|?|[;\n]")
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_SEPARATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;|&()\n]")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|&>>|&>|>>|>\||>&|<&|<>|[<>])")
_PLAIN = re.compile(r"[^\s\\'\"`$;|&()<>*?\[{}~#!]+")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
_ARITHMETIC = re.compile(r"\([\d +*/%<>=!&|^~?:,-]*\)\)", re.ASCII)
_EXPANSION = re.compile(r"#?(?:[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?=\}|:?[-=?+]|[#%/^,])", re.ASCII)
"""Variables by name, with a default or a part taken off. Of a place, an index, a name in a variable, and `@P` the shell
makes a command line once more, of whatever a variable holds, and `$_` holds the last word before."""
_BRACE_LIST = re.compile(r"\{[^\s{}]*(?:,|\.\.)")
_ODD = re.compile(r"[\0-\x08\x0b-\x1f\x7f]")


class Unreadable(ValueError):
    """What this file does not understand of a command line. The message is for the model."""


@dataclass(slots=True)
class Word:
    """`text` is what it says without its quotes; `is_fixed` whether that is all of it, `is_quoted` whether it has any
    quotes, so that it is no keyword."""

    text: str = ""
    is_fixed: bool = True
    is_quoted: bool = False


@dataclass(slots=True)
class Line:
    """The simple commands of a command line, each with its words, also those within substitutions."""

    commands: list[list[Word]] = field(default_factory=list)
    defines: bool = False
    """Whether it defines a function."""


def read_line(text: str) -> Line:
    """Read a command line.

    Raises:
        Unreadable: quotes or brackets that do not close, or more than this file knows.
    """
    if _SIMPLE.fullmatch(text):
        parts = (part.split() for part in _JOINED.split(text))
        return Line([[Word(word) for word in words] for words in parts if words])
    if _ODD.search(text):
        raise Unreadable("it holds control characters")
    line = Line()
    _Reader(text, line, 0).read_commands("")
    return line


class _Reader:
    def __init__(self, text: str, line: Line, depth: int) -> None:
        if depth > _DEEPEST:
            raise Unreadable("it is nested too deeply")
        self._text, self._line, self._depth = text, line, depth
        self._at = 0
        self._documents: list[tuple[str, bool, bool]] = []

    def read_commands(self, end: str) -> int:
        """Read up to the bracket `end`, or to the end of the text where it is empty; the position behind it."""
        words: list[Word] = []
        groups = 0
        text, length = self._text, len(self._text)
        while self._at < length:
            if blank := _BLANK.match(text, self._at):
                self._at = blank.end()
            elif text[self._at] == "#":
                newline = text.find("\n", self._at)
                self._at = length if newline < 0 else newline
            elif redirection := _REDIRECTION.match(text, self._at):
                if redirection.group().startswith("&"):  # in bash one sign, in other shells two: the command ends
                    words = self._ended(words, "")
                self._redirect(redirection)
            elif separator := _SEPARATOR.match(text, self._at):
                sign = separator.group()
                self._at = separator.end()
                words = self._ended(words, sign)
                if sign == "(":
                    if text.startswith("(", self._at):
                        raise Unreadable("it has ((, which is arithmetic for some shells; put a space between")
                    groups += 1
                elif sign == ")" and end == ")" and groups == 0:
                    return self._at
                elif sign == ")":
                    groups -= 1
                elif sign == "\n":
                    self._skip_documents()
            else:
                words.append(self._word())
        if end:
            raise Unreadable("a bracket does not close")
        if self._documents:
            raise Unreadable("a here-document does not end")
        self._ended(words, "")
        return self._at

    def _ended(self, words: list[Word], sign: str) -> list[Word]:
        if words:
            self._line.commands.append(words)
            self._line.defines |= sign == "("
        return []

    def _redirect(self, match: re.Match[str]) -> None:
        sign = match.group().lstrip("0123456789")
        self._at = match.end()
        if self._text[self._at : self._at + 1] == "(":  # <(…) and >(…)
            self._nested_brackets(self._at + 1)
            return
        if blank := _BLANK.match(self._text, self._at):
            self._at = blank.end()
        start = self._at
        if start >= len(self._text) or _SEPARATOR.match(self._text, start):
            raise Unreadable("a redirection leads nowhere")
        target = self._word()
        if sign in ("<<", "<<-"):
            if not target.is_fixed or "\n" in self._text[start : self._at]:
                raise Unreadable("the end of a here-document is not a plain word")
            self._documents.append((target.text, target.is_quoted, sign == "<<-"))

    def _skip_documents(self) -> None:
        for end, is_quoted, strips in self._documents:
            body: list[str] = []
            while True:
                if self._at >= len(self._text):
                    raise Unreadable("a here-document does not end")
                newline = self._text.find("\n", self._at)
                newline = len(self._text) if newline < 0 else newline
                row = self._text[self._at : newline]
                self._at = newline + 1
                if (row.lstrip("\t") if strips else row) == end:
                    break
                if row.endswith("\\") and not is_quoted:  # the shell joins the lines before it looks for the end
                    raise Unreadable("a line of a here-document ends in a backslash")
                body.append(row)
            if not is_quoted:
                _Reader("\n".join(body), self._line, self._depth + 1).read_text()
        self._documents = []

    def _word(self) -> Word:
        word, text, start = Word(), self._text, self._at
        while self._at < len(text):
            if plain := _PLAIN.match(text, self._at):
                word.text += plain.group()
                self._at = plain.end()
                continue
            sign = text[self._at]
            if sign in " \t\n;|&()<>":
                break
            word.is_quoted = word.is_quoted or sign in "\\'\"$`"
            if sign == "\\":
                word.text += text[self._at + 1 : self._at + 2].replace("\n", "")
                self._at += 2
            elif sign == "'":
                end = self._closing("'", self._at + 1)
                word.text += text[self._at + 1 : end]
                self._at = end + 1
            elif sign == '"':
                self._at += 1
                self._double_quoted(word)
            elif sign in "$`":
                self._substitution(word)
            else:  # what stands for itself in one place and not in another
                spelled_out = sign == "{" and _BRACE_LIST.match(text, self._at)
                word.is_fixed = word.is_fixed and sign in "#!{}" and not spelled_out
                word.text += sign
                self._at += 1
        if self._at == start:
            raise Unreadable(f"there is a {text[start : start + 1]!r} that does not belong there")
        return word

    def _double_quoted(self, word: Word) -> None:
        text = self._text
        while self._at < len(text):
            sign = text[self._at]
            if sign == '"':
                self._at += 1
                return
            if sign == "\\":
                following = text[self._at + 1 : self._at + 2]
                word.text += following if following in '$`"\\' else "" if following == "\n" else sign + following
                self._at += 2
            elif sign in "$`":
                self._substitution(word, within_quotes=True)
            else:
                word.text += sign
                self._at += 1
        raise Unreadable("a quote does not close")

    def read_text(self) -> None:
        """Read the substitutions of a text, which is otherwise no command line."""
        word = Word()
        while self._at < len(self._text):
            if self._text[self._at] in "$`":
                self._substitution(word, within_quotes=True)
            else:
                self._at += 2 if self._text[self._at] == "\\" else 1

    def _substitution(self, word: Word, within_quotes: bool = False) -> None:
        text, at = self._text, self._at
        if text[at] == "`":
            end = self._closing("`", at + 1)
            if "\\" in text[at:end]:
                raise Unreadable("it has backslashes in `…`; write $(…)")
            _Reader(text[at + 1 : end], self._line, self._depth + 1).read_commands("")
            word.is_fixed, self._at = False, end + 1
        elif text.startswith("$(", at):
            self._nested_brackets(at + 2)
            word.is_fixed = False
        elif text.startswith("${", at):
            self._expansion(at + 2)
            word.is_fixed = False
        elif text.startswith("$'", at) and not within_quotes:
            self._at = self._closing("'", at + 2, escapes=True) + 1
            word.is_fixed = False
        elif text.startswith('$"', at) and not within_quotes:
            self._at = at + 2
            self._double_quoted(word)
        elif variable := _VARIABLE.match(text, at):
            word.is_fixed, self._at = False, variable.end()
        elif text.startswith("$[", at):
            raise Unreadable("it has $[…]; write $((…))")
        else:
            word.text += "$"
            self._at += 1

    def _nested_brackets(self, start: int) -> None:
        """`$(…)`, `<(…)`: a command line of its own, unless it is arithmetic with numbers. With a name in it, the shell
        looks for numbers in what the name stands for, and runs the commands that stand there."""
        if self._text.startswith("(", start):
            arithmetic = _ARITHMETIC.match(self._text, start)
            if arithmetic is None:
                raise Unreadable("it has $((…)) with more than numbers; of brackets in brackets, put a space between")
            self._at = arithmetic.end()
            return
        reader = _Reader(self._text, self._line, self._depth + 1)
        reader._at = start
        self._at = reader.read_commands(")")

    def _expansion(self, start: int) -> None:
        """`${…}` up to its bracket, with the substitutions in it."""
        if not _EXPANSION.match(self._text, start):
            raise Unreadable("it has ${…} that is more than a variable, its default, or a part of it")
        self._at, word = start, Word()
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign == "}":
                self._at += 1
                return
            if sign in "\\'\"{":
                raise Unreadable("it has quotes or brackets in ${…}")
            if sign in "$`":
                self._substitution(word, within_quotes=True)
            else:
                self._at += 1
        raise Unreadable("a bracket does not close")

    def _closing(self, sign: str, start: int, escapes: bool = False) -> int:
        at = start
        while (found := self._text.find(sign, at)) >= 0:
            before = self._text[start:found]
            if not escapes or (len(before) - len(before.rstrip("\\"))) % 2 == 0:
                return found
            at = found + 1
        raise Unreadable("a quote does not close")
