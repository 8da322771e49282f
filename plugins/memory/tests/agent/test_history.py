"""`posttrain memory journal` and `posttrain memory undo`: changes of a vault are listed and undone."""

import re
from contextlib import closing

import pytest
from typer.testing import CliRunner

from posttrain.cli.main import app
from posttrain.errors import InputError
from posttrain_memory.agent.history import last_operations, undo
from posttrain_memory.vault.storage import RESERVED, DiskStorage
from posttrain_memory.vault.vault import Vault

NOTES = {"user.md": "# Me\n\n- city: Bern\n- cat: Tom\n", "entities/ada.md": "# Ada\n"}


@pytest.fixture
def notes(tmp_path):
    """A memory in which four things were done, as by a client of long ago."""
    for path, text in NOTES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    with closing(Vault(DiskStorage(tmp_path, sync=False))) as vault:
        vault.update("user.md", "- city: Bern\n- cat: Tom", "- city: Basel")
        vault.create("entities/bo.md", "# Bo\n")
        vault.move("entities/bo.md", "entities/bob.md")
        vault.delete("user.md")
    return tmp_path


def files(root):
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*.md"))}


def test_the_last_operations_are_listed_with_time_and_notes(notes):
    found = last_operations(notes, 3)
    assert len(found) == 3
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"   4  {when}  delete  user\.md \(removed\)", found[0])
    assert re.fullmatch(rf"   3  {when}  move    entities/bo\.md \(removed\), entities/bob\.md \(made\)", found[1])
    assert last_operations(notes, 99)[3].endswith("update  user.md (+1 -2 lines)")


def test_operations_are_undone_one_by_one(notes):
    states = [files(notes)]
    for name in ("delete", "move", "create", "update"):
        (line,) = undo(notes, 1)
        assert f" {name} " in line
        assert files(notes) not in states
        states.append(files(notes))
    assert states[-1] == NOTES
    assert last_operations(notes, 5) == []
    with pytest.raises(InputError, match="has 0 operations"):
        undo(notes, 1)


def test_several_operations_are_undone_or_none(notes):
    before = files(notes)
    with pytest.raises(InputError, match="has 4 operations"):
        undo(notes, 5)
    (notes / "entities/bob.md").write_text("by hand")
    with pytest.raises(InputError, match=r"'entities/bob\.md' was changed outside of the journal; nothing is undone"):
        undo(notes, 4)
    (notes / "entities/bob.md").write_text(before["entities/bob.md"])
    assert files(notes) == before
    assert len(undo(notes, 4)) == 4
    assert files(notes) == NOTES


def test_the_commands(notes):
    run = CliRunner().invoke
    listed = run(app, ["memory", "journal", str(notes), "--count", "2"])
    assert listed.exit_code == 0
    assert len(listed.stdout.splitlines()) == 2
    done = run(app, ["memory", "undo", str(notes), "--count", "4"])
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 4
    assert files(notes) == NOTES
    assert "nothing to undo" in run(app, ["memory", "journal", str(notes)]).stdout


def test_a_folder_that_is_not_a_vault_is_unchanged(tmp_path):
    for attempt in (lambda: undo(tmp_path, 1), lambda: last_operations(tmp_path, 1)):
        with pytest.raises(InputError, match="has no journal"):
            attempt()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_journal_is_reported_once(notes, capsys):
    (notes / RESERVED / "journal.jsonl").write_text('[1,"x",[[5,null,"a"]]]\n')
    before = files(notes)
    with pytest.raises(InputError, match="has 0 operations"):
        undo(notes, 1)
    assert f"was damaged and renamed to {RESERVED}/journal-damaged-1.jsonl" in capsys.readouterr().err
    assert last_operations(notes, 1) == []
    assert capsys.readouterr().err == ""
    assert files(notes) == before
