"""A folder of untrusted notes with a journal that tries to write, change or delete other files."""

from contextlib import closing
from pathlib import Path

import pytest

from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.storage import DiskStorage
from posttrain_memory.vault.vault import Vault

SECRET = "hunter2-outside"

FORGED = {
    "something beside the vault": '[1,"move",[["../evil.sh","echo pwned\\n",null],["user.md","# Me\\n","# X\\n"]]]',
    "the removal of a file outside": '[1,"move",[["../secret.md",null,"hunter2-outside"],["user.md","# Me\\n","# X\\n"]]]',
    "a path out of a folder": '[1,"move",[["entities/../../secret.md",null,"hunter2-outside"],["user.md","# Me\\n","# X\\n"]]]',
    "an absolute path": '[1,"move",[["/tmp/pwned.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a hidden note": '[1,"move",[[".hidden.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "the reserved folder": '[1,"move",[[".posttrain/lock","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a file that is no note": '[1,"move",[["evil.sh","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "an empty part": '[1,"move",[["a//b.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a path that is not in its normal form": '[1,"move",[["cafe\\u0301.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a path with a nul": '[1,"move",[["a\\u0000.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "one note twice": '[1,"move",[["a.md","x",null],["a.md","y",null],["user.md","# Me\\n","# X\\n"]]]',
    "half a character": '[1,"move",[["a.md","\\ud800",null],["user.md","# Me\\n","# X\\n"]]]',
    "what cannot be taken back": '[1,"move",[["b.md","y",null],["user.md/a.md","x",null],["b.md/c.md","x",null]]]',
    "a note in a note": '[1,"move",[["b.md","y",null],["b.md/c.md","x",null],["user.md","# Me\\n","# X\\n"]]]',
    "a note on the way to a note": '[1,"move",[["b.md/c.md","x",null],["b.md","y",null],["user.md","# Me\\n","# X\\n"]]]',
    "a number that is a text": '["x","y",[]]',
    "a number that is a truth value": '[true,"x",[["user.md","# Me\\n","# X\\n"]]]',
    "a number that goes back": '[2,"x",[["a.md",null,"a"]]]\n[1,"x",[["b.md",null,"b"]]]',
    "a path that is a number": '[1,"x",[[5,null,"a"]]]',
    "a text that is a number": '[1,"x",[["a.md",null,5]]]',
    "no changes": '[1,"x",[]]',
    "an object": '{"number": 1}',
    "deep nesting": "[" * 100_000,
    "a long number": "9" * 10_000,
    "nonsense": "\0\0\0",
    "no text": "\udcff\udcfe",
}
"""Journals in an untrusted folder of notes."""


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_forged_journal_changes_nothing_and_blocks_nothing(tmp_path, name, read_only):
    root = tmp_path / "notes"
    (root / ".posttrain").mkdir(parents=True)
    (tmp_path / "secret.md").write_text(SECRET)
    (root / "user.md").write_text("# Me\n")
    journal = FORGED[name].encode(errors="surrogateescape") + b"\n"
    (root / ".posttrain" / "journal.jsonl").write_bytes(journal)
    for times in range(2):
        vault = Vault(DiskStorage(root, read_only=read_only, sync=False))
        # An operation whose notes cannot be read is kept; one that cannot be reverted is reported on undo.
        stays = read_only or name == "what cannot be taken back"
        seen = not stays or not (name == "what cannot be taken back" or name.startswith("a note "))
        if seen and (read_only or not times):
            assert "damaged" in vault.journal.warning
            assert vault.journal.entries() == []
        assert vault.files() == {"user.md": "# Me\n"}
        assert not Path("/tmp/pwned.md").exists()
        outside = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
        assert outside == {"secret.md": SECRET}
        vault.close()
    kept = root / ".posttrain" / ("journal.jsonl" if stays else "journal-damaged-1.jsonl")
    assert kept.read_bytes() == journal
    if not stays:
        with closing(Vault(DiskStorage(root, sync=False))) as vault:
            vault.append("user.md", "- name: Ada")
            vault.journal.undo()
            assert vault.files() == {"user.md": "# Me\n"}


@pytest.mark.parametrize("path", [
    "../x.md", "a/../../x.md", "/tmp/x.md", "", ".", "..", ".x/a.md", ".posttrain/lock", "a//b.md", "a/", "x\0.md",
])  # fmt: skip
def test_the_storage_refuses_paths_outside_of_the_vault(tmp_path, path):
    root = tmp_path / "notes"
    (root / "a").mkdir(parents=True)
    (tmp_path / "x.md").write_text(SECRET)
    before = sorted(str(found) for found in tmp_path.rglob("*"))
    storage = DiskStorage(root, sync=False)
    for attempt in (lambda: storage.read(path, 99), lambda: storage.write(path, "x"), lambda: storage.remove(path)):
        with pytest.raises(VaultError, match="not the path of a note"):
            attempt()
    storage.close()
    after = sorted(str(found) for found in tmp_path.rglob("*") if ".posttrain" not in found.parts)
    assert after == before
    assert (tmp_path / "x.md").read_text() == SECRET
