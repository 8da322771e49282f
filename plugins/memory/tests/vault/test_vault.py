"""The tools of a vault and their error messages."""

import pytest

from posttrain_memory.vault.limits import VaultError, VaultLimits
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.tools import call, tools
from posttrain_memory.vault.vault import Vault

FILES = {
    "user.md": "# Me\n- name: Ada\n- friend: [[entities/bob.md|Bob]]\n- city: [[Berlin]]\n",
    "entities/bob.md": "# Bob\n- phone: 555\n\n## Work\n- at [[acme#Staff|Acme]]\n\n## Home\nBerlin\n",
    "entities/acme.md": "# Acme\n| who | what |\n|---|---|\n| [[bob\\|Bob]] | cook |\n\n## Staff\n- [[bob]]\n",
    "places/berlin.md": "# Berlin\n- the city of [[user]]\n",
}


def disk(root, files, **options):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return DiskStorage(root, sync=False, **options)


@pytest.fixture(params=["memory", "disk"])
def vault(request, tmp_path):
    found = Vault(MemoryStorage(FILES) if request.param == "memory" else disk(tmp_path, FILES))
    yield found
    found.close()


def refuses(function, *args, kind="ValueError"):
    with pytest.raises(VaultError) as error:
        function(*args)
    assert error.value.kind == kind
    return str(error.value)


def test_reading_and_writing(vault):
    assert vault.files() == FILES
    vault.create("entities/new.md", "x")
    vault.append("entities/new.md", "- y\n")
    vault.append("entities/new.md", "- z")
    assert vault.read("entities/new.md") == "x\n- y\n- z"
    vault.update("entities/new.md", "- y\n", "")
    assert vault.read("entities/new.md") == "x\n- z"
    vault.delete("entities/new.md")
    assert vault.files() == FILES


def test_errors_are_short_and_name_the_remedy(vault):
    missing = "FileNotFoundError"
    assert refuses(vault.read, "no.md", kind=missing) == "there is no note 'no.md'"
    assert refuses(vault.read, "bob.md", kind=missing) == "there is no note 'bob.md'; there is 'entities/bob.md'"
    assert refuses(vault.read, "User.md", kind=missing) == "there is no note 'User.md'; there is 'user.md'"
    assert refuses(vault.read, "user") == "'user' is not a note: the path of a note ends in .md"
    exists = "'user.md' exists already; use update_file or append_file"
    assert refuses(vault.create, "user.md", "", kind="FileExistsError") == exists
    assert "'user.md'" in refuses(vault.create, "USER.md", "", kind="FileExistsError")
    assert "'entities'" in refuses(vault.create, "Entities/x.md", "", kind="FileExistsError")
    assert "'user.md'" in refuses(vault.create, "user.md/x.md", "", kind="FileExistsError")
    assert refuses(vault.update, "user.md", "absent", "x").startswith("the old text is not in 'user.md'")
    assert refuses(vault.update, "user.md", "- ", "x").startswith("the old text is 3 times in 'user.md'")
    assert refuses(vault.update, "user.md", "", "x").startswith("the old text is empty")
    assert refuses(vault.update, "user.md", "Ada", "Ada") == "the old text and the new text are the same"
    assert refuses(vault.append, "user.md", "") == "the text to append is empty"
    assert refuses(vault.create, "x.md", "a\0b") == "a note may not hold characters that are not text"
    assert refuses(vault.create, "x.md", 3, kind="TypeError") == "the content of a note is a text"
    assert refuses(vault.read, None, kind="TypeError") == "a path is a text"
    assert refuses(vault.search, " ") == "the text to search for is empty"
    assert len(refuses(vault.read, "a" * 10_000)) < 120
    assert vault.files() == FILES
    assert vault.journal.entries() == []
    vault.create("a.md", "aaaa")
    assert "3 times" in refuses(vault.update, "a.md", "aa", "b")  # overlapping places count


def test_listing_and_searching(vault):
    assert vault.tree() == "user.md\nentities/\n  acme.md\n  bob.md\nplaces/\n  berlin.md"
    hits, count = vault.search("BERLIN")
    assert [(hit.path, hit.line) for hit in hits] == [("entities/bob.md", 8), ("places/berlin.md", 1), ("user.md", 4)]
    assert count == 3
    assert tools(vault)["search_files"]("555") == ["entities/bob.md:2: - phone: 555"]
    assert tools(vault)["search_files"]("nowhere") == []


def test_a_listing_and_a_search_are_cut():
    vault = Vault(MemoryStorage({f"n{i}.md": "" for i in range(9)}), VaultLimits(tree_lines=4))
    assert vault.tree().splitlines()[-2:] == ["n3.md", "… 5 more lines"]
    limits = VaultLimits(search_hits=2, snippet_chars=20)
    vault = Vault(MemoryStorage({"a.md": "\n".join(["x" * 90 + "needle" + "y" * 90] * 5)}), limits)
    lines = tools(vault)["search_files"]("NEEDLE")
    assert lines == ["a.md:1: …xxxxxxxneedleyyyyyyy…", "a.md:2: …xxxxxxxneedleyyyyyyy…", "… 3 more"]


def test_existence_and_size(vault):
    assert all(map(vault.exists, ("user.md", "entities", "entities/", "")))
    assert not any(map(vault.exists, ("x.md", "ent")))
    assert vault.size("user.md") == len(FILES["user.md"])
    assert vault.size() == sum(len(text.encode()) for text in FILES.values())
    assert vault.size("entities") == len(FILES["entities/bob.md"]) + len(FILES["entities/acme.md"])
    assert refuses(vault.size, "x", kind="FileNotFoundError") == "there is no note or folder 'x'"


def test_following_links(vault):
    bob = FILES["entities/bob.md"]
    for link in (
        "[[entities/bob.md]]",
        "[[entities/bob]]",
        "[[bob]]",
        "bob",
        "[[bob|my friend]]",
        "![[bob]]",
        "[[BOB]]",
        "bob.md",
    ):
        assert vault.follow(link) == bob
    assert vault.follow("[[bob#Work|w]]") == "## Work\n- at [[acme#Staff|Acme]]\n\n"
    assert vault.follow("[[bob#home]]") == "## Home\nBerlin\n"
    assert vault.follow("[[bob#Bob]]") == bob
    assert refuses(vault.follow, "[[bob#Nope]]") == "'entities/bob.md' has no heading 'Nope'"
    assert refuses(vault.follow, "[[nobody]]", kind="FileNotFoundError") == "no note fits the link '[[nobody]]'"
    assert refuses(vault.follow, "[[#Work]]") == "'[[#Work]]' names no note"
    assert refuses(vault.follow, "[[]]").endswith("is not a link: write [[note]]")
    vault.create("people/bob.md", "another")
    assert refuses(vault.follow, "[[bob]]") == "2 notes fit the link '[[bob]]'; write its whole path"


def test_moving_a_note_rewrites_links_in_their_form(vault):
    assert vault.backlinks("entities/bob.md") == ["entities/acme.md", "user.md"]
    assert vault.backlinks("user.md") == ["places/berlin.md"]
    assert vault.move("entities/bob.md", "people/robert.md") == 2
    assert "[[people/robert.md|Bob]]" in vault.read("user.md")
    assert vault.read("entities/acme.md").count("[[robert") == 2
    assert "[[robert\\|Bob]]" in vault.read("entities/acme.md")
    assert vault.backlinks("people/robert.md") == ["entities/acme.md", "user.md"]
    vault.journal.undo()
    assert vault.files() == FILES


def test_a_move_writes_the_whole_path_of_a_link_that_would_become_ambiguous(vault):
    vault.create("x.md", "[[bob]] and [[acme]]")
    assert vault.move("places/berlin.md", "places/bob.md") == 3
    assert vault.read("x.md") == "[[entities/bob]] and [[acme]]"
    assert vault.follow("[[entities/bob]]") == vault.read("entities/bob.md")
    vault.journal.undo()
    vault.move("entities/bob.md", "people/x.md")
    assert "[[people/x.md]]" in vault.read("entities/acme.md")
    assert vault.follow("[[people/x.md]]") == vault.read("people/x.md")
    # A note may change the case of its name.
    vault.move("people/x.md", "people/X.md")
    assert vault.exists("people/X.md")
    assert not vault.exists("people/x.md")


def test_limits():
    vault = Vault(MemoryStorage(), VaultLimits(file_bytes=10, files=2, total_bytes=15))
    assert refuses(vault.create, "a.md", "é" * 6, kind="OSError") == "'a.md' would have 12 bytes; a note may have 10"
    vault.create("a.md", "é" * 5)
    assert "15 bytes" in refuses(vault.create, "b.md", "x" * 6, kind="OSError")
    vault.create("b.md", "x" * 5)
    assert "15 bytes" in refuses(vault.append, "b.md", "y", kind="OSError")
    assert "2 notes" in refuses(vault.create, "c.md", kind="OSError")
    vault.move("a.md", "c.md")
    vault.update("c.md", "é" * 5, "")
    vault.append("b.md", "y")
    assert vault.size() == 7


def test_undo_and_diff(vault):
    mark = vault.journal.mark()
    vault.update("user.md", "Ada", "Eve")
    vault.create("x.md", "1\n")
    vault.delete("places/berlin.md")
    changes = vault.journal.changes(mark)
    assert [(change.path, change.before is None, change.after is None) for change in changes] == [
        ("places/berlin.md", False, True),
        ("user.md", False, False),
        ("x.md", True, False),
    ]
    assert "-- name: Ada\n+- name: Eve\n" in vault.journal.diff(mark)
    assert "--- (new)\n+++ x.md\n" in vault.journal.diff(mark)
    assert [vault.journal.undo()[0].operation for _ in range(3)] == ["delete", "create", "update"]
    assert vault.files() == FILES
    assert vault.journal.diff(mark) == ""
    assert refuses(vault.journal.undo) == "there is nothing to undo"


def test_calls_of_tools_are_checked(vault):
    functions = tools(vault)
    assert call(functions, "read_file", [], {"path": "user.md"}) == FILES["user.md"]
    assert refuses(call, functions, "read_file", [], {}, kind="TypeError") == "read_file takes (path)"
    assert (
        refuses(call, functions, "create_file", ["a"], {"x": 1}, kind="TypeError")
        == "create_file takes (path, content)"
    )
    assert refuses(call, functions, "nope", [], {}, kind="NameError") == "there is no function 'nope'"
    with pytest.raises(TypeError):  # an error inside a tool is not the model's fault
        call({"broken": lambda path: path + 1}, "broken", ["x"], {})


def test_a_model_cannot_delete_user_md(vault):
    """The user can delete it; no tool of a model does."""
    told = "user.md is where every question begins: it cannot be deleted or moved"
    functions = tools(vault)
    for name, args in (
        ("delete_file", ("user.md",)),
        ("delete_file", ("USER.md",)),
        ("move_file", ("user.md", "USER.md")),
        ("move_file", ("user.md", "entities/me.md")),
    ):
        assert refuses(functions[name], *args, kind="PermissionError") == told
    assert vault.files() == FILES
    vault.delete("user.md")


# -- line breaks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_note_keeps_its_line_breaks_and_a_model_sees_one_kind(end):
    text = "# Me\n- a: x\n- b: y\n".replace("\n", end)
    vault = Vault(MemoryStorage({"user.md": text}))
    functions = tools(vault)
    assert functions["read_file"]("user.md") == functions["follow_link"]("[[user]]") == "# Me\n- a: x\n- b: y\n"
    assert functions["follow_link"]("[[user#Me]]") == "# Me\n- a: x\n- b: y\n"
    functions["update_file"]("user.md", "- a: x\n- b: y", "- a: z\n- b: y\n- c: w")
    functions["append_file"]("user.md", "- d: 1\n- e: 2")
    functions["append_file"]("user.md", "- f: 3")
    assert vault.read("user.md") == "# Me\n- a: z\n- b: y\n- c: w\n- d: 1\n- e: 2\n- f: 3".replace("\n", end)
    assert refuses(vault.update, "user.md", "- a: z", "- a: z").startswith("the old text and the new")
    whole = functions["read_file"]("user.md")
    functions["update_file"]("user.md", whole, whole.replace("z", "x"))
    assert vault.read("user.md").count(end) == 6
    assert functions["read_file"]("user.md") == whole.replace("z", "x")


def test_mixed_line_breaks_outside_of_a_change_stay():
    vault = Vault(MemoryStorage({"a.md": "1\r\n2\n3\r\n4\r\n\u20285\r"}))
    vault.update("a.md", "2\r\n3", "2\n\n3")
    assert vault.read("a.md") == "1\r\n2\r\n\r\n3\r\n4\r\n\u20285\r"
    vault.update("a.md", "4\n\n5", "6")
    assert vault.read("a.md") == "1\r\n2\r\n\r\n3\r\n6\r"
