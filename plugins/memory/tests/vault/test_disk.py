"""A vault on disk: links and odd files are out of reach, one writer at a time, undo across processes, crashes."""

import os
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest

from posttrain.errors import InputError
from posttrain_memory.vault import journal as journal_module
from posttrain_memory.vault.limits import VaultError, VaultLimits
from posttrain_memory.vault.storage import RESERVED, DiskStorage
from posttrain_memory.vault.vault import Vault


def opened(root, **options):
    return Vault(DiskStorage(root, sync=False, **options), VaultLimits())


def test_files_that_are_not_notes_are_not_listed_read_or_replaced(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "vault"
    outside.mkdir()
    root.mkdir()
    (outside / "secret.md").write_text("secret")
    (root / "link.md").symlink_to(outside / "secret.md")
    (root / "folder").symlink_to(outside)
    os.link(outside / "secret.md", root / "hard.md")
    os.mkfifo(root / "pipe.md")
    (root / "directory.md").mkdir()
    (root / ".hidden.md").write_text("hidden")
    (root / "plain.txt").write_text("text")
    (root / "latin.md").write_bytes(b"\xe9")
    (root / "good.md").write_text("good")
    vault = opened(root)
    assert vault.paths() == ["good.md", "latin.md"]
    assert [hit.path for hit in vault.search("o")[0]] == ["good.md"]
    for path in ("link.md", "folder/secret.md", "hard.md", "pipe.md", "directory.md"):
        for name, *args in (("read", path), ("create", path, "x"), ("delete", path), ("move", "good.md", path)):
            with pytest.raises(VaultError):
                getattr(vault, name)(*args)
    with pytest.raises(VaultError, match=r"^'latin.md' is not UTF-8 text$"):
        vault.read("latin.md")
    assert (outside / "secret.md").read_text() == "secret"
    assert sorted(path.name for path in outside.iterdir()) == ["secret.md"]
    assert (root / "link.md").is_symlink()
    vault.close()


def test_one_writer_at_a_time_and_any_number_of_readers(tmp_path):
    writer = opened(tmp_path)
    writer.create("a.md", "1")
    with pytest.raises(InputError, match=f"is being written by process {os.getpid()}; end it first"):
        opened(tmp_path)
    reader = opened(tmp_path, read_only=True)
    assert reader.read("a.md") == "1"
    with pytest.raises(VaultError, match=r"^the memory is read-only$"):
        reader.create("b.md")
    reader.close()
    writer.close()
    opened(tmp_path).close()


def test_undo_reaches_into_earlier_processes(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from posttrain_memory.vault.storage import DiskStorage\n"
        "from posttrain_memory.vault.vault import Vault\n"
        "vault = Vault(DiskStorage(Path(sys.argv[1])))\n"
        "vault.create('a/b.md', 'one'); vault.update('a/b.md', 'one', 'two')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    vault = opened(tmp_path)
    assert vault.read("a/b.md") == "two"
    mark = vault.journal.mark()
    vault.append("a/b.md", "three")
    assert [change.path for change in vault.journal.changes(mark)] == ["a/b.md"]
    vault.journal.undo()
    vault.journal.undo()
    assert vault.read("a/b.md") == "one"
    vault.journal.undo()
    assert vault.paths() == []
    assert not (tmp_path / "a").exists()
    vault.close()


class Crash(BaseException):
    """The process ends."""


@contextmanager
def crash_after(steps, also=None):
    """The process ends before it writes note number `steps` of an operation, or in the method `also` of the journal."""
    original, done = journal_module.Journal._write_note, 0

    def put(self, changes, wanted):
        nonlocal done
        for change in changes:
            if done == steps:
                raise Crash
            done += 1
            original(self, (change,), wanted)

    def crash(*_):
        raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module.Journal, "_write_note", put)
        if also:
            patch.setattr(journal_module.Journal, also, crash)
        with pytest.raises(Crash):
            yield


LINKED = {"user.md": "[[b]]", "c.md": "[[b]]", "b.md": "text"}


@pytest.fixture
def linked(tmp_path):
    """A folder with notes of which two link to the third."""
    for path, text in LINKED.items():
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize("steps", range(4))
def test_a_crash_in_the_middle_of_an_operation_leaves_all_or_nothing(linked, steps):
    with closing(opened(linked)) as vault, crash_after(steps):
        vault.move("b.md", "new.md")
    with closing(opened(linked)) as again:
        assert again.files() == LINKED
        assert again.journal.entries() == []


@pytest.mark.parametrize("steps", range(5))
def test_a_crash_in_the_middle_of_undo_leaves_all_or_nothing(linked, steps):
    with closing(opened(linked)) as vault:
        vault.append("c.md", "first")
        vault.append("c.md", "more")
        vault.move("b.md", "new.md")
        after, entries = vault.files(), vault.journal.entries()
        with crash_after(steps, "_drop_from"):
            vault.journal.undo(2)
    with closing(opened(linked)) as again:
        if steps < 4:
            assert again.files() == after
            assert again.journal.entries() == entries
            again.journal.undo(2)
        # Once all notes were written, the undo counts, and it is never undone itself.
        assert again.files() == {**LINKED, "c.md": "[[b]]\nfirst"}
        assert [entry.number for entry in again.journal.entries()] == [1]


def test_undo_reverts_several_operations_or_none(tmp_path):
    vault = opened(tmp_path)
    vault.create("a.md", "one")
    vault.create("b.md", "two")
    vault.append("a.md", "three")
    vault.close()
    (tmp_path / "b.md").write_text("by hand")
    vault = opened(tmp_path)
    with pytest.raises(VaultError, match=r"^'b.md' was changed outside of the journal; nothing is undone$"):
        vault.journal.undo(1)
    with pytest.raises(VaultError, match=r"^the journal no longer has the operations to undo$"):
        vault.journal.undo(7)
    assert vault.files() == {"a.md": "one\nthree", "b.md": "by hand"}
    (tmp_path / "b.md").write_text("two")
    assert [entry.number for entry in vault.journal.undo(2)] == [3, 2]
    assert vault.files() == {"a.md": "one"}
    vault.append("a.md", "four")
    assert [entry.operation for entry in vault.journal.undo(1)] == ["append", "create"]
    assert vault.files() == {}
    vault.close()


def test_a_journal_without_times_is_read(tmp_path):
    (tmp_path / RESERVED).mkdir()
    (tmp_path / "a.md").write_text("one")
    (tmp_path / RESERVED / "journal.jsonl").write_text('[1, "create", [["a.md", null, "one"]]]\n')
    vault = opened(tmp_path)
    assert vault.journal.warning is None
    assert [entry.time for entry in vault.journal.entries()] == [None]
    vault.append("a.md", "two")
    vault.close()
    vault = opened(tmp_path)
    assert abs(vault.journal.entries()[1].time - time.time()) < 600
    vault.journal.undo(1)
    assert vault.files() == {}
    vault.close()


def test_a_truncated_line_of_the_journal_is_dropped(tmp_path):
    vault = opened(tmp_path)
    vault.create("a.md", "one")
    vault.close()
    with open(tmp_path / RESERVED / "journal.jsonl", "ab") as stream:
        stream.write(b'[2, "crea')
    vault = opened(tmp_path)
    vault.create("b.md", "two")
    vault.close()
    vault = opened(tmp_path)
    assert [entry.number for entry in vault.journal.entries()] == [1, 2]
    vault.close()


def test_the_journal_drops_what_is_too_long_or_old_but_never_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_BYTES", 1_000)
    vault = opened(tmp_path)
    for number in range(40):
        vault.create(f"{number}.md", "x" * 100)
        assert (tmp_path / RESERVED / "journal.jsonl").stat().st_size < 2_200
    assert [entry.number for entry in vault.journal.entries()][-5:] == [36, 37, 38, 39, 40]
    vault.create("long.md", "x" * 5_000)
    assert [entry.number for entry in vault.journal.entries()] == [41]
    vault.close()
    vault = opened(tmp_path)
    vault.journal.undo()
    assert not vault.exists("long.md")
    vault.create("again.md")
    assert [entry.operation for entry in vault.journal.entries()] == ["create"]
    vault.close()
    # By number, the oldest are dropped.
    (tmp_path / "few").mkdir()
    with closing(Vault(DiskStorage(tmp_path / "few", sync=False), VaultLimits(journal_entries=3))) as vault:
        for number in range(10):
            vault.create(f"{number}.md", str(number))
    with closing(opened(tmp_path / "few")) as vault:
        assert 3 <= len(vault.journal.entries()) <= 6
        assert vault.journal.entries()[-1].number == 10


def test_refusals_leave_no_descriptor_open(tmp_path):
    (tmp_path / "link.md").symlink_to("nowhere")
    (tmp_path / "directory.md").mkdir()
    vault = opened(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for path in ("link.md", "directory.md", "a/b.md", "link.md/x.md"):
            for attempt in (vault.read, vault.delete, vault.backlinks, vault.follow):
                with pytest.raises(VaultError):
                    attempt(path)
        vault.create("a/b.md")
        vault.delete("a/b.md")
    assert len(os.listdir("/proc/self/fd")) == before
    vault.close()


def test_a_failed_write_leaves_the_old_note_and_no_temporary_file(tmp_path, monkeypatch):
    vault = opened(tmp_path)
    vault.create("a.md", "old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(VaultError, match=r"^the disk is full$"):
            vault.append("a.md", "new")
    assert vault.read("a.md") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [RESERVED, "a.md"]
    assert [entry.operation for entry in vault.journal.entries()] == ["create"]
    vault.close()


def test_a_missing_folder_and_a_reserved_folder_that_is_a_link_are_refused(tmp_path):
    with pytest.raises(InputError, match="create the folder first"):
        DiskStorage(tmp_path / "nowhere")
    outside, root = tmp_path / "outside", tmp_path / "vault"
    outside.mkdir()
    root.mkdir()
    (root / RESERVED).symlink_to(outside)
    for read_only in (False, True):
        with pytest.raises(InputError, match="remove it"):
            Vault(DiskStorage(root, read_only=read_only))
    assert list(outside.iterdir()) == []


def test_files_of_a_killed_write_are_removed_by_the_next_writer(tmp_path):
    (tmp_path / "entities").mkdir()
    (tmp_path / RESERVED).mkdir()
    (tmp_path / ".git").mkdir()
    left = [tmp_path / part / f".{'0a' * 8}.new" for part in ("", "entities", RESERVED)]
    kept = [tmp_path / ".git" / f".{'0a' * 8}.new", tmp_path / ".note.new", tmp_path / "user.md"]
    for file in (*left, *kept):
        file.write_text("secret")
    opened(tmp_path, read_only=True).close()
    assert all(file.exists() for file in left)
    opened(tmp_path).close()
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in kept)
