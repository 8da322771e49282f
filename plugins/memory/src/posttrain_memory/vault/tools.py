"""The functions that model code may call, by name. They run in the parent process, on a vault."""

import inspect
from collections.abc import Callable, Mapping

from posttrain_memory.vault.limits import VaultError, quoted
from posttrain_memory.vault.paths import USER, case_key
from posttrain_memory.vault.text import with_line_feeds
from posttrain_memory.vault.vault import Vault

NAMES = (
    "create_file", "read_file", "update_file", "append_file", "delete_file", "move_file",
    "list_files", "search_files", "file_exists", "get_size", "follow_link", "backlinks",
)  # fmt: skip
"""The names of all tools, in the order of the system prompt."""


def tools(vault: Vault) -> dict[str, Callable[..., object]]:
    """Name -> function. Each returns text, a list of texts, a number or a Boolean, or raises VaultError."""

    def create_file(path: str, content: str = "") -> bool:
        """Create a note; it must not exist."""
        vault.create(path, content)
        return True

    def read_file(path: str) -> str:
        """The text of a note."""
        return with_line_feeds(vault.read(path))

    def update_file(path: str, old: str, new: str) -> bool:
        """Replace a text that occurs in the note exactly once."""
        vault.update(path, old, new)
        return True

    def append_file(path: str, text: str) -> bool:
        """Append text to a note, on a new line."""
        vault.append(path, text)
        return True

    def delete_file(path: str) -> bool:
        """Delete a note."""
        _check_not_start(path)
        vault.delete(path)
        return True

    def move_file(path: str, to: str) -> bool:
        """Move or rename a note; links to it are rewritten."""
        _check_not_start(path)
        vault.move(path, to)
        return True

    def list_files() -> str:
        """The tree of all notes."""
        return vault.tree()

    def search_files(text: str) -> list[str]:
        """The lines that contain a text, as `path:line: text`."""
        hits, count = vault.search(text)
        lines = [f"{hit.path}:{hit.line}: {hit.text}" for hit in hits]
        return [*lines, f"… {count - len(hits)} more"] if count > len(hits) else lines

    def file_exists(path: str) -> bool:
        """Whether a note or folder exists."""
        return vault.exists(path)

    def get_size(path: str = "") -> int:
        """Size in bytes of a note, a folder, or all notes."""
        return vault.size(path)

    def follow_link(link: str) -> str:
        """The text that a link refers to."""
        return with_line_feeds(vault.follow(link))

    def backlinks(path: str) -> list[str]:
        """The notes that link to a note."""
        return vault.backlinks(path)

    functions: list[Callable[..., object]] = [
        create_file, read_file, update_file, append_file, delete_file, move_file,
        list_files, search_files, file_exists, get_size, follow_link, backlinks,
    ]  # fmt: skip
    return {function.__name__: function for function in functions}


def _check_not_start(path: object) -> None:
    """Raise VaultError for the entry note, in any case: the file system may ignore case."""
    if isinstance(path, str) and len(path) <= 4 * len(USER) and case_key(path) == USER:
        raise VaultError(f"{USER} is where every question begins: it cannot be deleted or moved", "PermissionError")


def call(
    functions: Mapping[str, Callable[..., object]], name: str, args: list[object], kwargs: dict[str, object]
) -> object:
    """Call the function `name`. Raises VaultError also if there is no such function or the arguments do not match."""
    function = functions.get(name)
    if function is None:
        raise VaultError(f"there is no function {quoted(name)}", "NameError")
    try:
        return function(*args, **kwargs)
    except TypeError:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            taken = ", ".join(inspect.signature(function).parameters)
            raise VaultError(f"{name} takes ({taken})", "TypeError") from None
        # The arguments match, so the error is in the function, not in the model's call.
        raise
