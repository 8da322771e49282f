"""The limits of a vault, and the one error that it raises."""

from pydantic import Field

from posttrain.recipe.base import BaseConfig


class VaultLimits(BaseConfig):
    """How large a vault may grow, and how much of it one answer shows."""

    file_bytes: int = Field(65_536, ge=1)
    """Largest note, in bytes of UTF-8."""
    files: int = Field(1_000, ge=1)
    """Largest number of notes."""
    total_bytes: int = Field(4_194_304, ge=1)
    """Largest sum of all notes, in bytes of UTF-8."""
    depth: int = Field(6, ge=1, le=16)
    """Most parts of a path, the name of the note included."""
    path_bytes: int = Field(200, ge=8, le=1_000)
    """Longest path, in bytes of UTF-8."""
    tree_lines: int = Field(300, ge=1)
    """Most lines of a listing; a last line says how many are left out."""
    search_hits: int = Field(20, ge=1)
    """Most hits of a search; a last line says how many are left out."""
    snippet_chars: int = Field(160, ge=20)
    """Most characters of a line that a search shows."""
    journal_entries: int = Field(1_000, ge=1)
    """Changes that can be undone; older ones are forgotten."""


class VaultError(Exception):
    """Why a vault refused: one short stable sentence, without paths of the host.

    `kind` is the name of the built-in exception that a model's code sees it as.
    """

    def __init__(self, message: str, kind: str = "ValueError") -> None:
        super().__init__(message)
        self.kind = kind


def shown(text: object, length: int = 60) -> str:
    """`text` in quotes for an error message: one line, printable, at most `length` characters and an ellipsis."""
    plain = "".join(c if c.isprintable() else "?" for c in str(text)[: length + 1])
    return f"'{plain[:length]}…'" if len(plain) > length else f"'{plain}'"
