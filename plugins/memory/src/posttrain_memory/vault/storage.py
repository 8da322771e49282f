"""Storage of notes: in memory, one copy per episode, or in a folder on disk."""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path

from posttrain.errors import InputError
from posttrain.locks import lock
from posttrain_memory.vault.limits import VaultError, VaultLimits, quoted
from posttrain_memory.vault.paths import note_path

RESERVED = ".posttrain"
"""Folder inside a vault that holds its lock and journal. Notes cannot have hidden names, so tools cannot reach it."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.new")
"""Name of a file while it is written."""
_ANY = VaultLimits(depth=16, path_bytes=1_000)
"""Which files in a folder count as notes. A vault may accept fewer."""


class MemoryStorage:
    """Notes in memory, initialized with a copy of `files`: normalized path (`paths.note_path`) -> text."""

    read_only = False

    def __init__(self, files: Mapping[str, str] | None = None) -> None:
        self._files = dict(files or {})
        self._sizes = {path: len(text.encode()) for path, text in self._files.items()}

    def sizes(self) -> dict[str, int]:
        """Path -> size in bytes of UTF-8, for every note."""
        return self._sizes

    def read(self, path: str, limit: int) -> str | None:
        """The text, or None if no note has exactly this path. VaultError if larger than `limit` bytes or not UTF-8."""
        if self._sizes.get(path, 0) > limit:
            raise VaultError(f"{quoted(path)} is larger than {limit} bytes")
        return self._files.get(path)

    def write(self, path: str, text: str) -> None:
        """Create or replace a note; on disk, another process reads either the old or the new text."""
        self._files[path], self._sizes[path] = text, len(text.encode())

    def remove(self, path: str) -> None:
        """Delete a note and folders that become empty."""
        del self._files[path], self._sizes[path]

    def close(self) -> None:
        """Release files and locks."""


class DiskStorage:
    """Notes in the existing folder `root`, with the methods of `MemoryStorage`.

    Paths are opened component by component from the folder's file descriptor without following links, so neither a
    symbolic link nor a folder replaced meanwhile leads outside. Only regular files with one hard link count. A note
    is written to a temporary file that is then renamed. On a file system that ignores case, a note has only the spelling
    that its folders list.

    Writing requires a lock, held until `close`; InputError if another process holds it. With `read_only`, no lock is
    taken and nothing can be written. With `sync`, writes are flushed to disk before they count and survive a power
    failure.
    """

    def __init__(self, root: Path, read_only: bool = False, sync: bool = True) -> None:
        self.read_only, self.sync = read_only, sync
        try:
            # The folder itself may be a symbolic link: the user chose it, not the model.
            self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"{root} cannot be opened as a vault: {error.strerror}; create the folder first") from None
        self._lock = -1
        if not read_only:
            try:
                self._lock = self._locked(root)
                self._remove_unfinished(self._root, 0)
            except BaseException:
                self.close()
                raise

    def sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with _listing(self._root) as root:
            self._walk(root, "", sizes, 0)
        return sizes

    def read(self, path: str, limit: int) -> str | None:
        try:
            with self._parent(path, exact=True) as (folder, name):
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _refused(path, error) from None
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            os.close(file)
            raise VaultError(f"{quoted(path)} is not a plain file", "PermissionError")
        with open(file, "rb") as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise VaultError(f"{quoted(path)} is larger than {limit} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise VaultError(f"{quoted(path)} is not UTF-8 text") from None

    def write(self, path: str, text: str) -> None:
        try:
            with self._parent(path, make=True) as (folder, name):
                self._replace(folder, name, text.encode())
        except OSError as error:
            raise _refused(path, error) from None

    def remove(self, path: str) -> None:
        try:
            with self._parent(path) as (folder, name):
                os.unlink(name, dir_fd=folder)
            while "/" in path:
                path = path.rpartition("/")[0]
                with self._parent(path) as (folder, name):
                    os.rmdir(name, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise _refused(path, error) from None

    def close(self) -> None:
        for descriptor in (self._lock, self._root):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._root = -1

    def reserved(self, name: str) -> int:
        """A read-write file descriptor of a file in the reserved folder, which is created if missing.

        Raises FileNotFoundError if it is missing and the vault is read-only.
        """
        flags = os.O_RDONLY if self.read_only else os.O_RDWR | os.O_CREAT
        with self._reserved_folder() as folder:
            file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            os.close(file)
            raise InputError(f"{RESERVED}/{name} of the vault is not a regular file; remove it")
        return file

    def replace_reserved(self, name: str, data: bytes) -> None:
        """Create or replace a file in the reserved folder atomically."""
        with self._reserved_folder() as folder:
            self._replace(folder, name, data)

    def move_aside(self, name: str) -> str:
        """Rename a file in the reserved folder to an unused name and return that name."""
        stem, dot, suffix = name.partition(".")
        with self._reserved_folder() as folder:
            taken = set(os.listdir(folder))
            new = next(new for n in count(1) if (new := f"{stem}-damaged-{n}{dot}{suffix}") not in taken)
            os.rename(name, new, src_dir_fd=folder, dst_dir_fd=folder)
        return new

    @contextmanager
    def _reserved_folder(self) -> Iterator[int]:
        if not self.read_only:
            _make_folder(RESERVED, self._root)
        try:
            folder = os.open(RESERVED, _FOLDER, dir_fd=self._root)
            try:
                yield folder
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
                raise InputError(f"{RESERVED} of the vault is not a folder of regular files; remove it") from None
            raise

    def _locked(self, root: Path) -> int:
        try:
            file = self.reserved("lock")
        except OSError as error:
            raise InputError(f"{root} cannot be written: {error.strerror}; open it read-only") from None
        try:
            lock(file)
        except OSError:
            owner = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            raise InputError(
                f"{root} is being written by process {owner or 'unknown'}; end it first, or open the vault read-only"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        return file

    @contextmanager
    def _parent(self, path: str, make: bool = False, exact: bool = False) -> Iterator[tuple[int, str]]:
        """The file descriptor of the parent folder of `path`, and the last path component.

        Raises OSError like the system calls; with `exact`, FileNotFoundError if a component is listed with different
        case only. Raises VaultError for a path that could lead out of the folder, even
        though the vault has validated it: refusing links does not stop `..`.
        """
        *folders, name = path.split("/")
        if any(not part or part.startswith(".") or "\0" in part for part in (*folders, name)):
            raise VaultError(f"{quoted(path)} is not the path of a note", "PermissionError")
        here = os.dup(self._root)
        try:
            for part in folders:
                if make:
                    _make_folder(part, here)
                if exact:
                    _check_spelling(part, here)
                inner = os.open(part, _FOLDER, dir_fd=here)
                os.close(here)
                here = inner
            if exact:
                _check_spelling(name, here)
            yield here, name
        finally:
            os.close(here)

    def _replace(self, folder: int, name: str, data: bytes) -> None:
        new = f".{secrets.token_hex(8)}.new"
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
        try:
            with open(file, "wb") as stream:
                stream.write(data)
                stream.flush()
                if self.sync:
                    os.fsync(file)
            os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(new, dir_fd=folder)
            raise
        if self.sync:
            os.fsync(folder)

    def _remove_unfinished(self, folder: int, depth: int) -> None:
        """Delete the temporary files of writes that a killed process began. Only the holder of the lock writes."""
        with os.scandir(folder) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False) and depth <= _ANY.depth:
                    if entry.name.startswith(".") and (depth or entry.name != RESERVED):
                        continue
                    with suppress(OSError):
                        inner = os.open(entry.name, _FOLDER, dir_fd=folder)
                        try:
                            self._remove_unfinished(inner, depth + 1)
                        finally:
                            os.close(inner)
                elif _UNFINISHED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        os.unlink(entry.name, dir_fd=folder)

    def _walk(self, folder: int, prefix: str, sizes: dict[str, int], depth: int) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and depth < _ANY.depth:
                    try:
                        inner = os.open(entry.name, _FOLDER, dir_fd=folder)
                    except OSError:
                        continue
                    try:
                        self._walk(inner, f"{path}/", sizes, depth + 1)
                    finally:
                        os.close(inner)
                elif entry.is_file(follow_symlinks=False) and is_note(path):
                    facts = entry.stat(follow_symlinks=False)
                    if facts.st_nlink == 1:
                        sizes[path] = facts.st_size


Storage = MemoryStorage | DiskStorage
"""The vault validates paths. A storage on disk additionally refuses any path that leads out of its folder."""


def _make_folder(name: str, parent: int) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)


@contextmanager
def _listing(folder: int) -> Iterator[int]:
    """Another file descriptor of a folder: those of one `open`, copies included, share the position of a listing."""
    other = os.open(".", _FOLDER, dir_fd=folder)
    try:
        yield other
    finally:
        os.close(other)


def _check_spelling(name: str, parent: int) -> None:
    """Raise FileNotFoundError unless the folder lists `name` in exactly this spelling."""
    with _listing(parent) as folder:
        known = name in os.listdir(folder)
    if not known:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


@lru_cache(maxsize=16_384)
def is_note(path: str) -> bool:
    """Whether `path` is a normalized note path."""
    try:
        return note_path(path, _ANY) == path
    except VaultError:
        return False


def _refused(path: str, error: OSError) -> VaultError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
        return VaultError(f"{quoted(path)} is not a plain file in plain folders", "PermissionError")
    if error.errno == errno.ENOENT:
        return VaultError(f"there is no note {quoted(path)}", "FileNotFoundError")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return VaultError("the disk is full", "OSError")
    return VaultError(f"{quoted(path)} cannot be opened", "PermissionError")
