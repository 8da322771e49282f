"""Properties of vaults, paths, updates and limits, on random ones."""

import json
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_memory.interpreter.worker import JsonConverter
from posttrain_memory.vault.limits import VaultError, VaultLimits
from posttrain_memory.vault.links import Link, Notes, parse_link, rewrite_links, section, targets
from posttrain_memory.vault.paths import collision, note_path
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.text import with_line_feeds
from posttrain_memory.vault.vault import Vault

quick = settings(max_examples=150, deadline=None)
few = settings(max_examples=25, deadline=None)
LIMITS = VaultLimits(file_bytes=40, files=4, total_bytes=90)
NAMES = ["a", "B", "b", "é", "e\u0301", "user", "..", ".h", "con", "", "x y", "ß", "SS"]
texts = st.text(alphabet="ab\n[]|#é😀", max_size=14)
hostile = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from([*NAMES, "~", "C:", "\u2024\u2024", "\uff0e"]), min_size=1, max_size=8).map(
        lambda parts: "/".join(parts) + ".md"
    ),
)
plain = st.builds(
    lambda folder, name: f"{folder}{name}.md", st.sampled_from(["", "p/", "q/r/"]), st.sampled_from(["a", "b", "c"])
)


@quick
@given(hostile)
def test_an_accepted_path_is_inside_visible_and_normal(path):
    try:
        clean = note_path(path, VaultLimits())
    except VaultError as refused:
        error = str(refused)
    else:
        error = ""
    assert len(error) < 160
    assert error.isprintable()
    if error:
        return
    assert note_path(clean, VaultLimits()) == clean == unicodedata.normalize("NFC", path)
    root = Path("/root/of/vault")
    resolved = Path(root, clean)
    assert resolved.is_relative_to(root)
    assert ".." not in resolved.parts
    assert all(not part.startswith(".") and part == part.strip() for part in clean.split("/"))
    assert clean.endswith(".md")
    assert len(clean.encode()) <= 200
    assert clean.isprintable()


@quick
@given(plain, st.lists(plain))
def test_paths_collide_if_they_differ_only_in_case_or_one_contains_the_other(path, others):
    assert collision(path, others) is None
    assert collision(path.upper(), [path]) is not None
    assert collision(f"{path}/x.md", [path]) == path
    assert collision(path, [f"{path}/x.md"]) == f"{path}/x.md"


@quick
@given(texts, texts, texts, texts)
def test_an_update_changes_one_place_or_nothing(before, old, new, after):
    text = before + old + after
    vault = Vault(MemoryStorage({"n.md": text}))
    places = [at for at in range(len(text)) if old and text.startswith(old, at)]
    if len(places) == 1 and old != new:
        vault.update("n.md", old, new)
        assert vault.read("n.md") == text[: places[0]] + new + text[places[0] + len(old) :]
        vault.journal.undo()
    else:
        with pytest.raises(VaultError) as error:
            vault.update("n.md", old, new)
        if len(places) > 1:
            assert f"{len(places)} times" in str(error.value)
    assert vault.files() == {"n.md": text}
    assert not vault.journal.entries()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("create"), plain, texts),
        st.tuples(st.just("append"), plain, texts),
        st.tuples(st.just("update"), plain, texts, texts),
        st.tuples(st.just("delete"), plain),
        st.tuples(st.just("move"), plain, plain),
        st.tuples(st.just("undo")),
    ),
    max_size=14,
)


def play(vault, script):
    """Execute the steps; returns the content of the vault after each, and the errors."""
    history = [vault.files()]
    seen = []
    for name, *args in script:
        refused = ""
        try:
            if name == "undo":
                vault.journal.undo()
                history.pop()
                assert vault.files() == history[-1]
            else:
                getattr(vault, name)(*args)
                history.append(vault.files())
        except VaultError as error:
            refused = str(error)
            assert vault.files() == history[-1]
        seen.append((refused, vault.files(), vault.tree(), vault.size()))
    return history, seen


@quick
@given(steps)
def test_no_steps_break_the_limits_and_all_of_them_can_be_undone(script):
    vault = Vault(MemoryStorage(), LIMITS)
    history, seen = play(vault, script)
    for _, found, _, size in seen:
        assert len(found) <= LIMITS.files
        assert size == sum(len(text.encode()) for text in found.values()) <= LIMITS.total_bytes
        assert all(len(text.encode()) <= LIMITS.file_bytes for text in found.values())
    changed = {change.path: change.after for change in vault.journal.changes() if change.after is not None}
    assert changed == vault.files()
    while len(history) > 1:
        assert vault.files() == history.pop()
        vault.journal.undo()
    assert vault.files() == {}


@few
@given(steps)
def test_a_vault_on_disk_behaves_like_one_in_memory_and_persists(script):
    memory = Vault(MemoryStorage(), LIMITS)
    with tempfile.TemporaryDirectory() as root:
        disk = Vault(DiskStorage(Path(root), sync=False), LIMITS)
        assert play(disk, script) == play(memory, script)
        disk.close()
        again = Vault(DiskStorage(Path(root), sync=False), LIMITS)
        assert again.files() == memory.files()
        assert again.journal.entries() == memory.journal.entries()
        while again.journal.entries():
            again.journal.undo()
        assert again.files() == {}
        assert [path.name for path in Path(root).iterdir()] == [".posttrain"]
        again.close()


@quick
@given(
    st.text(alphabet="ab/. é", min_size=1, max_size=12).filter(str.strip),
    st.none() | st.text(alphabet="h é", max_size=6),
    st.none() | st.text(alphabet="x y", max_size=6),
)
def test_a_link_is_read_as_it_was_written(target, heading, alias):
    link = Link(target.strip(), heading and heading.strip(), alias and alias.strip())
    assert targets(f"before {link} after") == {link.target}
    assert parse_link(str(link)) == parse_link(str(link)[2:-2]) == link


@quick
@given(st.lists(plain, min_size=1, unique=True), st.data())
def test_a_move_keeps_the_targets_of_all_links(paths, data):
    old = data.draw(st.sampled_from(paths))
    new = data.draw(st.sampled_from(["new.md", "p/new.md", "z/a.md", "z/b.md"]))
    forms = [*paths, *(path.removesuffix(".md") for path in paths), "a", "b", "c.md", "none"]
    written = data.draw(st.lists(st.sampled_from(forms), max_size=6))
    text = " ".join(f"[[{target}#h|x]]" for target in written)
    before, after = Notes(paths), Notes({*paths, new} - {old})
    changed = [parse_link(link) for link in rewrite_links(text, old, new, before, after).split()]
    assert len(changed) == len(written)
    for target, link in zip(written, changed, strict=True):
        assert (link.heading, link.alias) == ("h", "x")
        led = before.resolve_or_none(target)
        if led is None:
            assert link.target == target
        else:
            assert after.resolve_or_none(link.target) == (new if led == old else led)


@quick
@given(st.lists(st.sampled_from(["# A\n", "## B\n", "### C\n", "text\n", "```\n", "## A #\n"]), max_size=10))
def test_a_section_begins_with_its_heading_and_is_part_of_the_note(lines):
    text = "".join(lines)
    found = section(text, "b")
    if found is None:
        fenced = False
        for line in lines:
            fenced ^= line == "```\n"
            assert fenced or line != "## B\n"
    else:
        assert found in text
        assert found.startswith("## B\n")
        fenced = False
        for line in found.splitlines(keepends=True)[1:]:
            fenced ^= line == "```\n"
            assert fenced or line not in ("# A\n", "## B\n", "## A #\n")


@few
@given(st.text(max_size=60))
def test_any_text_survives_on_disk(text):
    with tempfile.TemporaryDirectory() as root:
        vault = Vault(DiskStorage(Path(root), sync=False))
        try:
            vault.create("n.md", text)
            assert vault.read("n.md") == text
        except VaultError:
            assert "\0" in text or any("\ud800" <= c <= "\udfff" for c in text)
        vault.close()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=9) | st.integers(), inner, max_size=9),
    max_leaves=80,
)


@settings(max_examples=50, deadline=None)
@given(values, st.integers(20, 600))
def test_results_are_json_of_limited_size(value, most):
    shown = JsonConverter(most).value(value)
    assert len(json.dumps(shown, ensure_ascii=False, allow_nan=False)) <= 4 * most + 1_000
    plenty = JsonConverter(1_000_000).value(value)
    assert len(repr(plenty)) >= len(repr(shown)) - 1_000
    assert JsonConverter(1_000_000).value(plenty) == plenty


_BROKEN = st.text(alphabet="ab\n\r\v\u2028", max_size=12)


@quick
@given(_BROKEN, st.data(), st.text(alphabet="cd\n", min_size=1, max_size=4))
def test_shown_text_of_a_note_can_be_replaced(note, data, new):
    """An update of shown text changes only that text."""
    shown = with_line_feeds(note)
    start = data.draw(st.integers(0, len(shown)))
    old = shown[start : data.draw(st.integers(start, len(shown)))]
    vault = Vault(MemoryStorage({"a.md": note}))
    try:
        vault.update("a.md", old, new)
    except VaultError:
        assert not old or shown.find(old) != shown.rfind(old) or old == new
        return
    found = vault.read("a.md")
    head, tail = shown.split(old)
    assert with_line_feeds(found) == head + new + tail
    if "\r" not in note.replace("\r\n", ""):
        kept = next(n for n in range(len(note) + 1) if with_line_feeds(note[:n]) == head)
        assert found.startswith(note[:kept])
