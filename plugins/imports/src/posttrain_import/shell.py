"""Read the simple commands of a shell script: words, assignments and variables. Nothing is executed."""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import InputError

LONGEST = 128 * 1024
"""Maximum characters of a script, and of all values that its variables are replaced with."""
_MOST_COMMANDS = 1_000
_MOST_DOCUMENTS = 100
_TOO_LARGE = "the script is larger than the command of a training run ({}); copy the command to a file, and import that"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_HEREDOC = re.compile(
    r"^[ \t]*read\b[^\n]*?\b([A-Za-z_]\w*)\s*<<-?\s*['\"]?(\w+)['\"]?[ \t]*\n(.*?)^[ \t]*\2[ \t]*$", re.M | re.S
)
_KEYWORDS = {"if", "then", "else", "elif", "fi", "for", "while", "do", "done", "case", "esac", "{", "}", "!", "time"}
_ALWAYS = {"@": "", "*": "", "HOME": str(Path.home()), "PWD": "."}
_EXPANSION = r"\$\{(?:[A-Za-z_]\w*|[@*\d])(?::?[-=][^}]*)?\}|\$(?:[A-Za-z_]\w*|[@*\d])|\$[({]|[$`]"
_VARIABLE = re.compile(r"\$\{?(\w+|[@*])(?:(:?)[-=](.*))?", re.S)
_START = r"(?<![^\s;&|()<>])(?<!\\[\s;&|()<>])"
"""A place where a word begins."""
_TOKEN = re.compile(
    rf"""
      (?P<no_word>{_START}"\$(?:@|\{{@\}})"(?=[\s;&|)]|\Z))  # the arguments of the script, of which there are none
    | '(?P<literal>[^']*)'
    | "(?P<quoted>(?:\\.|\$\{{[^}}"]{{0,200}}\}}|[^"\\])*+)"
    | (?P<open>['"])
    | \\(?P<escaped>.?)
    | (?P<expansion>{_EXPANSION})
    | (?P<comment>{_START}\#[^\n]*)
    | (?P<placeholder><[A-Za-z][\w-]*(?:[ ][A-Za-z][\w-]*)*>)  # as documents write it; no file is read and written so
    | (?P<redirection>(?:{_START}\d|&)?>(?!\()>?(?:&\d?)?|(?:{_START}\d)?<(?![<(]))
    | (?P<process>[<>]\([^\n]*)
    | (?P<operator>&&|\|\||[;|&\n()])
    | (?P<space>[^\S\n]+)
    | (?P<plain><+|[^\s'"\\$`<>;&|()]+)
    """,
    re.S | re.X,
)
_IN_QUOTES = re.compile(rf"""\\(["\\$`])|({_EXPANSION})""")


@dataclass(frozen=True)
class Command:
    """One simple command: its words after the shell has expanded them, and the assignments in front of it."""

    words: tuple[str, ...]
    assignments: Mapping[str, str]


@dataclass
class _Word:
    text: str
    quoted: bool = False


def read_commands(text: str, variables: Mapping[str, str]) -> list[Command]:
    """The simple commands of `text`, in order. `variables` win over assignments of the script. Exported variables that
    the script does not read are assignments in front of later commands.

    Raises:
        InputError: a variable or a placeholder has no value, a command is substituted, or a quotation is not closed.
    """
    known: dict[str, str] = {}
    exported: dict[str, str] = {}
    commands: list[Command] = []
    if len(text) > LONGEST or text.count("<<") > _MOST_DOCUMENTS:
        raise InputError(_TOO_LARGE.format(f"{LONGEST:,} characters, {_MOST_DOCUMENTS} documents"))
    # A backslash at the end of a line continues it, even with spaces after it, which copied commands often have.
    joined = re.sub(r"\\[ \t]*(?:\n|\Z)", " ", text)
    for document in _HEREDOC.finditer(joined):
        known[document[1]] = " ".join(document[3].split())
    joined = _HEREDOC.sub("", joined)
    for words in _split(joined, ChainMap(dict(variables), known, _ALWAYS)):
        given: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0].text)) and not words[0].quoted:
            given[match[1]] = match[2]
            words.pop(0)
        while words and words[0].text in _KEYWORDS:
            words.pop(0)
        if words and words[0].text in ("export", "local", "declare", "readonly"):
            given |= {match[1]: match[2] for word in words[1:] if (match := _ASSIGNMENT.fullmatch(word.text))}
            # A variable that the script reads itself has its effect in the words of a command.
            read = {name for name in given if re.search(rf"\$\{{?{name}\b", joined)}
            exported |= {name: given[name] for name in given.keys() - read if words[0].text == "export"}
            words = []
        if len(commands) + len(exported) > _MOST_COMMANDS:
            raise InputError(_TOO_LARGE.format(f"{_MOST_COMMANDS:,} commands and exported variables"))
        if words:
            commands.append(Command(tuple(word.text for word in words), {**exported, **given}))
        else:
            known |= given
    return commands


def _split(text: str, values: Mapping[str, str]) -> Iterator[list[_Word]]:
    """The words of each simple command, without redirections and comments. Reads `values` while they are being filled."""
    words: list[_Word] = []
    word: _Word | None = None
    target, expanded = False, 0  # whether the next word is the file of a redirection; characters of values

    def expand(expansion: str, rest: str) -> str:
        nonlocal expanded
        if expansion == "$":
            return "$"
        match = _VARIABLE.fullmatch(expansion.removesuffix("}"))
        if match is None:
            why = (
                "an expansion that the importer does not read" if expansion == "${" else "the output of another command"
            )
            raise InputError(f"{_first_line(rest)} is {why}; write its value instead")
        value = values.get(match[1])
        if value is None or (
            match[2] and not value
        ):  # `${NAME-DEFAULT}` keeps an empty value, `${NAME:-DEFAULT}` does not
            value = match[3]
        if value is None:
            raise InputError(f"${match[1]} has no value in the command; add {match[1]}=VALUE after it")
        expanded += len(value)
        if expanded > LONGEST:
            raise InputError(_TOO_LARGE.format(f"{LONGEST:,} characters of values of variables"))
        return value

    for match in _TOKEN.finditer(text):
        kind, part = str(match.lastgroup), match[str(match.lastgroup)]
        quoted = kind in ("literal", "quoted")
        if kind == "open":
            raise InputError(f"a {part} of the command has no second one; close the quotation")
        if kind == "process":
            raise InputError(f"{_first_line(part)} is the output of another command; write its value instead")
        if kind == "placeholder":
            name = re.sub(r"\W", "_", part[1:-1])
            if name not in values:
                raise InputError(f"{part} of the command stands for a value; add {name}=VALUE after the command")
            part = values[name]
        if kind == "expansion":
            part = expand(part, text[match.start() : match.start() + 40])
            if word is None and len(part.split()) > 1:  # an unquoted variable is split into words
                words += map(_Word, part.split())
            if word is None and len(part.split()) != 1 and part != "$":
                continue
        if kind == "quoted":
            part = _IN_QUOTES.sub(lambda inner: inner[1] or expand(inner[2], inner.string[inner.start() :]), part)
        if quoted or kind in ("escaped", "expansion", "placeholder", "plain"):
            word = word or _Word("", quoted)
            word.text += part
        elif kind in ("redirection", "operator", "space"):
            if word is not None and not target:
                words.append(word)
            if kind == "redirection":
                target = not re.search(r"&\d$", part)
            elif word is not None or kind == "operator":
                target = False
            word = None
            if kind == "operator" and words:
                yield words
                words = []
    if word is not None and not target:
        words.append(word)
    if words:
        yield words


def _first_line(text: str) -> str:
    return repr(text[:40].splitlines()[0])


def assignments(words: list[str]) -> dict[str, str]:
    """`NAME=VALUE` words as a mapping. InputError for others."""
    matches = {word: _ASSIGNMENT.fullmatch(word) for word in words}
    for word, match in matches.items():
        if match is None:
            raise InputError(f"{word} is not NAME=VALUE; quote the whole command, or name one file")
    return {match[1]: match[2] for match in matches.values() if match}
