"""Size limits of a vault, and its exception."""

from pydantic import Field

from posttrain.recipe.base import BaseConfig


class VaultLimits(BaseConfig):
    """Size limits of a vault and of what one answer shows."""

    file_bytes: int = Field(65_536, ge=1)
    """Maximum size of a note, in bytes of UTF-8."""
    files: int = Field(1_000, ge=1)
    """Maximum number of notes."""
    total_bytes: int = Field(4_194_304, ge=1)
    """Maximum total size of all notes, in bytes of UTF-8."""
    depth: int = Field(6, ge=1, le=16)
    """Maximum number of path components, including the file name."""
    path_bytes: int = Field(200, ge=8, le=1_000)
    """Maximum length of a path, in bytes of UTF-8."""
    tree_lines: int = Field(300, ge=1)
    """Maximum number of lines in a listing. A last line gives the number of omitted lines."""
    search_hits: int = Field(20, ge=1)
    """Maximum number of search results. A last line gives the number of omitted results."""
    snippet_chars: int = Field(160, ge=20)
    """Maximum number of characters of a line in a search result."""
    journal_entries: int = Field(1_000, ge=1)
    """Number of operations that can be undone; older ones are dropped."""


class VaultError(Exception):
    """An operation that a vault refused: a short, stable sentence without paths of the host.

    `kind` is the name of the built-in exception that the model's code receives.
    """

    def __init__(self, message: str, kind: str = "ValueError") -> None:
        super().__init__(message)
        self.kind = kind


def quoted(text: object, length: int = 60) -> str:
    """`text` quoted for an error message: one printable line of at most `length` characters and an ellipsis."""
    plain = "".join(c if c.isprintable() else "?" for c in str(text)[: length + 1])
    return f"'{plain[:length]}…'" if len(plain) > length else f"'{plain}'"
