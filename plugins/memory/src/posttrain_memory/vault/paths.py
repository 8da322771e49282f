"""Valid note paths: relative, visible, portable, Unicode-normalized, ending in `.md`."""

import unicodedata
from collections.abc import Iterable

from posttrain_memory.vault.limits import VaultError, VaultLimits, quoted

SUFFIX = ".md"
USER = "user.md"
"""The entry note of a vault."""
_FORBIDDEN = frozenset('\\:*?"<>|#^[]')
"""Characters with a special meaning in some file system or in wikilinks."""
_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of invisible or unassigned characters: controls, bidirectional marks, surrogates, private use."""
_PORTS = tuple(f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³")
_DEVICES = frozenset(("con", "prn", "aux", "nul", "conin$", "conout$", *_PORTS))
"""Reserved device names on some systems, with any suffix."""


def note_path(path: object, limits: VaultLimits) -> str:
    """The normalized path of a note. Raises VaultError if the path is not valid."""
    clean = _checked(path, limits)
    if not clean.endswith(SUFFIX) or clean.rpartition("/")[2] == SUFFIX:
        raise VaultError(f"{quoted(path)} is not a note: the path of a note ends in .md")
    return clean


def folder_path(path: object, limits: VaultLimits) -> str:
    """The normalized path of a folder, without a trailing slash; "" is the whole vault."""
    if path == "":
        return ""
    return _checked(path.removesuffix("/") if isinstance(path, str) else path, limits)


def case_key(path: str) -> str:
    """A form of the path that ignores case."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", path).casefold())


def portable_path(path: str, others: Iterable[str]) -> str:
    """The valid path of a note that is closest to `path`, which another program wrote, and conflicts with none of `others`.

    Characters that a path may not hold become hyphens.
    """
    parts = [_portable(part) for part in unicodedata.normalize("NFKC", path).removesuffix(SUFFIX).split("/")]
    stem, others = "/".join(filter(None, parts)) or "note", list(others)
    clean, number = f"{stem}{SUFFIX}", 1
    while collision(clean, others) or clean in others:
        number += 1
        clean = f"{stem}-{number}{SUFFIX}"
    return clean


def _portable(part: str) -> str:
    text = "".join("-" if c in _FORBIDDEN or unicodedata.category(c) in _CATEGORIES else c for c in part)
    text = text.encode()[:120].decode(errors="ignore").strip(" .")
    return f"-{text}" if text.split(".")[0].strip().casefold() in _DEVICES else text


def collision(path: str, others: Iterable[str]) -> str | None:
    """The existing path that conflicts with `path`, or None.

    Paths conflict if they, or their folders, differ only in case, or if a note would also be a folder.
    """
    parts = path.split("/")
    folders = {case_key("/".join(parts[:n])): "/".join(parts[:n]) for n in range(1, len(parts))}
    key = case_key(path)
    for other in others:
        known = case_key(other)
        if known == key and other != path:
            return other
        if known in folders or known.startswith(f"{key}/"):
            return other
        pieces = other.split("/")
        for n in range(1, len(pieces)):
            folder = "/".join(pieces[:n])
            if folders.get(case_key(folder), folder) != folder:
                return folder
    return None


def _checked(path: object, limits: VaultLimits) -> str:
    if not isinstance(path, str):
        raise VaultError("a path is a text", "TypeError")
    if not path:
        raise VaultError("the path is empty")
    # Check the length before anything that looks at each character.
    if len(path) > limits.path_bytes:
        raise VaultError(f"the path is longer than {limits.path_bytes} bytes")
    if any(unicodedata.category(c) in _CATEGORIES for c in path):
        raise VaultError(f"{quoted(path)} holds a character that a path may not hold")
    clean = unicodedata.normalize("NFC", path)
    if len(clean.encode()) > limits.path_bytes:
        raise VaultError(f"the path is longer than {limits.path_bytes} bytes")
    if clean.startswith(("/", "~")):
        raise VaultError(f"{quoted(path)} is outside of the memory: a path begins with a folder or a note")
    # A compatibility form, such as a one-dot leader, must not normalize to a path that would have been refused.
    for form in (clean, unicodedata.normalize("NFKC", clean)):
        parts = form.split("/")
        for refused, why in (
            (".." in parts, "is outside of the memory: a path may not hold '..'"),
            (not all(parts) or "." in parts, "has an empty part"),
            (any(c in _FORBIDDEN for c in form), "holds a character that a path may not hold"),
            (len(parts) > limits.depth, f"has more than {limits.depth} parts"),
            (any(part.startswith(".") for part in parts), "is hidden: no part may begin with a dot"),
            (
                any(part != part.strip() or part.endswith(".") for part in parts),
                "has a part with a blank or a dot at its edge",
            ),
            (any(part.split(".")[0].strip().casefold() in _DEVICES for part in parts), "is a reserved name"),
        ):
            if refused:
                raise VaultError(f"{quoted(path)} {why}")
    return clean
