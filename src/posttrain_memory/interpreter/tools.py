"""The functions that a model's code may call, under their names. They run on the trusted side, over a vault."""

import inspect
from collections.abc import Callable, Mapping

from posttrain_memory.vault.limits import VaultError, shown
from posttrain_memory.vault.paths import START, same
from posttrain_memory.vault.text import shown_lines
from posttrain_memory.vault.vault import Vault

NAMES = (
    "create_file",
    "read_file",
    "update_file",
    "append_file",
    "delete_file",
    "move_file",
    "list_files",
    "search_files",
    "file_exists",
    "get_size",
    "follow_link",
    "backlinks",
)
"""The names of all tools, in the order in which a prompt tells them."""


def tools(vault: Vault) -> dict[str, Callable[..., object]]:
    """Name -> function. Each returns text, a list of texts, a number or a truth value, or raises VaultError."""

    def create_file(path: str, content: str = "") -> bool:
        """Make a note; it must not exist yet."""
        vault.create(path, content)
        return True

    def read_file(path: str) -> str:
        """The text of a note."""
        return shown_lines(vault.read(path))

    def update_file(path: str, old: str, new: str) -> bool:
        """Replace a text that stands in the note exactly once."""
        vault.update(path, old, new)
        return True

    def append_file(path: str, text: str) -> bool:
        """Add text on a new line at the end of a note."""
        vault.append(path, text)
        return True

    def delete_file(path: str) -> bool:
        """Take a note away."""
        _check_not_start(path)
        vault.delete(path)
        return True

    def move_file(path: str, to: str) -> bool:
        """Move or rename a note; links to it are mended."""
        _check_not_start(path)
        vault.move(path, to)
        return True

    def list_files() -> str:
        """The tree of all notes."""
        return vault.tree()

    def search_files(text: str) -> list[str]:
        """The lines that hold a text, as `path:line: text`."""
        hits, count = vault.search(text)
        lines = [f"{hit.path}:{hit.line}: {hit.text}" for hit in hits]
        return [*lines, f"… {count - len(hits)} more"] if count > len(hits) else lines

    def file_exists(path: str) -> bool:
        """Whether there is such a note or folder."""
        return vault.exists(path)

    def get_size(path: str = "") -> int:
        """Bytes of a note, a folder, or all notes."""
        return vault.size(path)

    def follow_link(link: str) -> str:
        """The text that a link leads to."""
        return shown_lines(vault.follow(link))

    def backlinks(path: str) -> list[str]:
        """The notes that link to a note."""
        return vault.backlinks(path)

    functions: list[Callable[..., object]] = [
        create_file, read_file, update_file, append_file, delete_file, move_file,
        list_files, search_files, file_exists, get_size, follow_link, backlinks,
    ]  # fmt: skip
    return {function.__name__: function for function in functions}


def _check_not_start(path: object) -> None:
    """VaultError for the note that all others are reached from, in any case of its letters: a disk may ignore that."""
    if isinstance(path, str) and len(path) <= 4 * len(START) and same(path) == START:
        raise VaultError(f"{START} is where every question begins: it cannot be deleted or moved", "PermissionError")


def call(
    functions: Mapping[str, Callable[..., object]], name: str, args: list[object], kwargs: dict[str, object]
) -> object:
    """What the function `name` returns. VaultError also where there is no such function or its arguments do not fit."""
    function = functions.get(name)
    if function is None:
        raise VaultError(f"there is no function {shown(name)}", "NameError")
    try:
        return function(*args, **kwargs)
    except TypeError:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            taken = ", ".join(inspect.signature(function).parameters)
            raise VaultError(f"{name} takes ({taken})", "TypeError") from None
        # The arguments fit: it is the function's own fault, not the model's.
        raise
