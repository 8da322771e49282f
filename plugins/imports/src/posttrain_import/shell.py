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
TOO_LARGE = "the script is larger than the command of a training run ({}); copy the command to a file, and import that"
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_HEREDOC = re.compile(
    r"^[ \t]*read\b[^\n]*?\b([A-Za-z_]\w*)\s*<<-?\s*['\"]?(\w+)['\"]?[ \t]*\n(.*?)^[ \t]*\2[ \t]*$", re.M | re.S
)
_KEYWORDS = {"if", "then", "else", "elif", "fi", "for", "while", "do", "done", "case", "esac", "{", "}", "!", "time"}
_ALWAYS = {"@": "", "*": "", "HOME": str(Path.home()), "PWD": "."}
_PLAIN = re.compile(r'.[^"\\$`]*', re.S)
_OPERATORS = ("&&", "||", ";", "|", "&", "\n", "(", ")")
_ARGUMENTS = re.compile(r'"\$(?:@|\{@\})"(?=[\s;&|)]|\Z)')
"""The arguments of the script, of which there are none: no word, unlike other texts in quotation marks."""


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
        InputError: a variable has no value, a command is substituted, or a quotation is not closed.
    """
    known: dict[str, str] = {}
    exported: dict[str, str] = {}
    commands: list[Command] = []
    if len(text) > LONGEST or text.count("<<") > _MOST_DOCUMENTS:
        raise InputError(TOO_LARGE.format(f"{LONGEST:,} characters, {_MOST_DOCUMENTS} documents"))
    # A backslash at the end of a line continues it, even with spaces after it, which copied commands often have.
    joined = re.sub(r"\\[ \t]*(?:\n|\Z)", " ", text)
    for document in _HEREDOC.finditer(joined):
        known[document[1]] = " ".join(document[3].split())
    joined = _HEREDOC.sub("", joined)
    for words in _split(joined, known, variables):
        given: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0].text)) and not words[0].quoted:
            given[match[1]] = match[2]
            words.pop(0)
        while words and words[0].text in _KEYWORDS:
            words.pop(0)
        if words and words[0].text in ("export", "local", "declare", "readonly"):
            given |= {found[1]: found[2] for word in words[1:] if (found := _ASSIGNMENT.fullmatch(word.text))}
            # A variable that the script reads itself has its effect in the words of a command.
            read = {name for name in given if re.search(rf"\$\{{?{name}\b", joined)}
            exported |= {name: given[name] for name in given.keys() - read if words[0].text == "export"}
            words = []
        if len(commands) + len(exported) > _MOST_COMMANDS:
            raise InputError(TOO_LARGE.format(f"{_MOST_COMMANDS:,} commands and exported variables"))
        if words:
            commands.append(Command(tuple(word.text for word in words), {**exported, **given}))
        else:
            known |= given
    return commands


def _split(text: str, known: dict[str, str], variables: Mapping[str, str]) -> Iterator[list[_Word]]:
    """The words of each simple command, without redirections and comments. Reads `known` while it is being filled."""
    words: list[_Word] = []
    word: _Word | None = None
    position, skip, expanded = 0, False, 0
    values = ChainMap(dict(variables), known, _ALWAYS)

    def expansion() -> str:
        nonlocal position, expanded
        value, position = _expansion(text, position, values)
        expanded += len(value)
        if expanded > LONGEST:
            raise InputError(TOO_LARGE.format(f"{LONGEST:,} characters of values of variables"))
        return value

    def end_word() -> None:
        nonlocal word, skip
        if word is not None and not skip:
            words.append(word)
        if word is not None:
            skip = False
        word = None

    while position < len(text):
        char = text[position]
        if char == "'":
            end = text.find("'", position + 1)
            if end < 0:
                raise InputError("a ' of the command has no second one; close the quotation")
            word = word or _Word("", True)
            word.text += text[position + 1 : end]
            position = end + 1
        elif word is None and (match := _ARGUMENTS.match(text, position)):
            position = match.end()
        elif char == '"':
            word = word or _Word("", True)
            position += 1
            while text[position : position + 1] != '"':
                if position >= len(text):
                    raise InputError('a " of the command has no second one; close the quotation')
                if text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`"):
                    word.text += text[position + 1]
                    position += 2
                elif text[position] in "$`":
                    word.text += expansion()
                else:
                    end = _PLAIN.match(text, position).end()  # type: ignore[union-attr]
                    word.text += text[position:end]
                    position = end
            position += 1
        elif char == "\\":
            word = word or _Word("")
            word.text += text[position + 1 : position + 2]
            position += 2
        elif char in "$`":
            value = expansion()
            parts = value.split()
            # An unquoted variable is split into words.
            if word is None and len(parts) > 1:
                words += [_Word(part) for part in parts]
            else:
                word = word or _Word("")
                word.text += value
                word = word if word.text else None
        elif char == "#" and word is None:
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif (
            match := re.compile(r"&>>?|\d?>>?(?:&\d?)?|\d?<(?![<(])").match(text, position)
            if word is None or char in "<>"
            else None
        ):
            end_word()
            skip = not re.search(r"&\d$", match[0])
            position = match.end()
        elif text.startswith(("<(", ">("), position):
            raise InputError(f"{_start(text, position)} is the output of another command; write its value instead")
        elif operator := next((one for one in _OPERATORS if text.startswith(one, position)), None):
            end_word()
            skip = False
            if words:
                yield words
                words = []
            position += len(operator)
        elif char.isspace():
            end_word()
            position += 1
        else:
            word = word or _Word("")
            word.text += char
            position += 1
    end_word()
    if words:
        yield words


def _expansion(text: str, position: int, values: Mapping[str, str]) -> tuple[str, int]:
    """The value of the expansion at `position`, and where the text continues."""
    if text.startswith(("$(", "`"), position):
        raise InputError(f"{_start(text, position)} is the output of another command; write its value instead")
    if match := re.compile(r"\$\{([A-Za-z_]\w*|[@*\d])(?::?([-=])([^}]*))?\}|\$([A-Za-z_]\w*|[@*\d])").match(
        text, position
    ):
        name = match[1] or match[4]
        value = values.get(name, match[3] if match[2] else None)
        if value is None:
            raise InputError(f"${name} has no value in the command; add {name}=VALUE after it")
        return value, match.end()
    if text.startswith("${", position):
        raise InputError(f"{_start(text, position)} is an expansion that the importer does not read; write its value")
    return text[position], position + 1


def _start(text: str, position: int) -> str:
    return repr(text[position : position + 40].splitlines()[0])


def assignments(words: list[str]) -> dict[str, str]:
    """`NAME=VALUE` words as a mapping. InputError for others."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise InputError(f"{word} is not NAME=VALUE; quote the whole command, or name one file")
        found[name] = value
    return found
