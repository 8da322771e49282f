"""The functions that model code may call, by name. They run in the parent process, on a vault."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps

from posttrain_memory.vault.limits import VaultError, quoted
from posttrain_memory.vault.paths import USER, case_key
from posttrain_memory.vault.text import with_line_feeds
from posttrain_memory.vault.vault import Vault


def tools(vault: Vault) -> dict[str, Callable[..., object]]:
    """Name -> function, with the arguments of a method of the vault.

    Each returns text, a list of texts, a number or a Boolean, or raises VaultError.
    """

    def done(method: Callable[..., object], keeps_start: bool = False) -> Callable[..., object]:
        """Return True. With `keeps_start`, the note that every question begins with is refused."""

        @wraps(method)
        def change(path: str, *args: str, **kwargs: str) -> bool:
            # In any case, because the file system may ignore case.
            if keeps_start and isinstance(path, str) and len(path) <= 4 * len(USER) and case_key(path) == USER:
                reason = f"{USER} is where every question begins: it cannot be deleted or moved"
                raise VaultError(reason, "PermissionError")
            method(path, *args, **kwargs)
            return True

        return change

    def shown(method: Callable[..., str]) -> Callable[..., object]:
        """Return text with one kind of line breaks."""
        return wraps(method)(lambda *args, **kwargs: with_line_feeds(method(*args, **kwargs)))

    def search_files(text: str) -> list[str]:
        """The lines that contain a text, as `path:line: text`."""
        hits, count = vault.search(text)
        lines = [f"{hit.path}:{hit.line}: {hit.text}" for hit in hits]
        return [*lines, f"… {count - len(hits)} more"] if count > len(hits) else lines

    return {
        "create_file": done(vault.create),
        "read_file": shown(vault.read),
        "update_file": done(vault.update),
        "append_file": done(vault.append),
        "delete_file": done(vault.delete, keeps_start=True),
        "move_file": done(vault.move, keeps_start=True),
        "list_files": vault.tree,
        "search_files": search_files,
        "file_exists": vault.exists,
        "get_size": vault.size,
        "follow_link": shown(vault.follow),
        "backlinks": vault.backlinks,
    }


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
