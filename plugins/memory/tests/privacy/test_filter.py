"""Privacy rules: the documents that are understood, the view of the model, and no leaks in view or reply."""

import json
import re
from time import process_time

import pytest

from posttrain.errors import InputError
from posttrain_memory.privacy.filter import HIDDEN, PrivacyFilter
from posttrain_memory.privacy.rules import Rule, RuleSet, parse_rules, vault_rules
from posttrain_memory.vault.text import split_question

FILES = {
    "user.md": "# Vera Oakmond\n\n- home town: Tarvale\n- sister: [[entities/mara_lindt.md|Mara Lindt]]\n- dog: [[entities/rolo.md]]\n"
    "- phone: +1 200 300 4000\n",
    "entities/mara_lindt.md": "# Mara Lindt\n\nMara hums when she works.\n\n- **phone number**: +4 555 010 9999\n- city: Porto\n"
    "- salary: $4,200\n- email: mara@lindt.example\n- birthday: 3 May 1990\n- allergies: dust, grass and eggs\n- children: 3\n"
    "- dog: [[entities/rolo.md|Rolo]]\n\nCall her on +4-555-010-9999, she was born on 1990-05-03.\n",
    "entities/rolo.md": "---\nweight: 31 kg\n---\n# Rolo\n\n| what | value |\n| --- | --- |\n| fee | 80 EUR |\n| chip | C-12345 |\n\n"
    "- keeper: [[entities/mara_lindt.md]]\n- salary of [[entities/mara_lindt.md|Mara Lindt]]: 4200 USD\n",
}
MARA, ROLO = "entities/mara_lindt.md", "entities/rolo.md"


def hide(**rule):
    return json.dumps({"hide": [rule]})


def only(**rule):
    return json.dumps({"only": [rule]})


MARAS = {"note": "Mara Lindt"}
UNDERSTOOD = {
    "hide: [{category: phone}]": RuleSet(hide=(Rule(category="phone"),)),
    "hide:\n  - note: Mara Lindt\n    label: salary\n": RuleSet(hide=(Rule(note="Mara Lindt", label="salary"),)),
    "only: [{label: city}]\nhide: [{value: 4711}]": RuleSet(hide=(Rule(value="4711"),), only=(Rule(label="city"),)),
    "{hide: [{note: entities/*}], to: mcp}": RuleSet(hide=(Rule(note="entities/*"),), to="mcp"),
    # Every scalar is text.
    "hide: [{value: 2024-05-03}, {label: no}]": RuleSet(hide=(Rule(value="2024-05-03"), Rule(label="no"))),
}
HIDE_PHONES = hide(category="phone")
NOT_UNDERSTOOD = [
    "", "Do not reveal phone numbers.", "hide: everything", "hide: []", "hide: [{}]", "hide: [{category: secrets}]",
    "hide: [{lable: salary}]", "hide: [{note: Zed Foo, label: city}]", "only: [{note: Zed Foo}]",
    "only: [{value: Porto}]", "show: [{category: phone}]", "hide: [{value: x}]",
    "{hide: [{category: phone}], to: everyone}", "hide: [{category: phone}", "hide: &a [*a]", "[" * 5000,
    f"hide: [{{value: {'x' * 30_000}}}]",
]  # fmt: skip


@pytest.mark.parametrize("text", UNDERSTOOD)
def test_documents_become_rules(text):
    assert parse_rules(text) == UNDERSTOOD[text]


@pytest.mark.parametrize("text", NOT_UNDERSTOOD)
def test_unknown_rules_deny_all_access(text):
    closed = PrivacyFilter([text], FILES)
    assert closed.problem.reason
    assert (closed.view, closed.clean("Porto"), closed.active) == ({}, HIDDEN, True)


def test_rules_of_a_vault_are_read_for_their_audience(tmp_path):
    assert vault_rules(tmp_path, "mcp") == []
    file = tmp_path / "privacy.yaml"
    file.write_text("hide: [{category: phone}]\n---\nhide: [{label: salary}]\nto: mcp\n")
    assert [parse_rules(text).hide[0].label for text in vault_rules(tmp_path, "mcp")] == [None, "salary"]
    assert len(vault_rules(tmp_path, "chat")) == 1
    for wrong in (b"hide: everything", b"\xff"):
        file.write_bytes(wrong)
        with pytest.raises(InputError):
            vault_rules(tmp_path, "chat")


def test_one_unknown_rule_denies_all_access():
    assert PrivacyFilter([HIDE_PHONES, "Be discreet."], FILES).view == {}


@pytest.mark.parametrize(
    ("message", "question", "rules"),
    [
        ("Who? <filter>Hide dates.</filter>", "Who?", ["Hide dates."]),
        ("<filter>a</filter>Who?<FILTER >b</ filter>", "Who?", ["a", "b"]),
        ("Who? <filter>Hide dates.", "Who?", ["Hide dates."]),
        ("Who? <filter></filter>", "Who?", [""]),
        ("Who?", "Who?", []),
    ],
)
def test_rules_are_removed_from_the_question(message, question, rules):
    assert split_question(message) == (question, rules)


def test_without_rules_nothing_changes():
    free = PrivacyFilter([], FILES)
    assert (free.view, free.active, free.clean("Porto")) == (FILES, False, "Porto")


HIDES = {
    hide(**MARAS, label="phone number"): (["555"], ["Porto", "200 300", "mara@", "C-12345"]),
    HIDE_PHONES: (["555", "200 300"], ["Porto", "mara@lindt", "3 May"]),
    hide(**MARAS, label="salary"): (["4,200", "4200"], ["80 EUR", "Porto", "31 kg"]),
    hide(category="date"): (["3 May", "1990"], ["Porto", "555"]),
    hide(**MARAS, label="birthday"): (["3 May", "1990"], ["Porto", "4,200"]),
    hide(**MARAS, label="city"): (
        ["Porto"],
        ["Tarvale", "555", "hums", "sister: [[entities/mara", "keeper: [[entities"],
    ),
    hide(**MARAS, label="allergies"): (["dust", "grass", "eggs"], ["Porto", "Mara"]),
    hide(**MARAS): (["Mara", "mara_lindt", "Porto", "4200", "555"], ["Tarvale", "31 kg"]),
    only(**MARAS, label="city"): (
        ["4,200", "4200", "555", "200", "3 May", "1990", "31 kg", "80 EUR", "C-12345", "hums", "Tarvale", "dust"],
        ["Porto", "[[entities/mara_lindt.md|Mara Lindt]]", "[[entities/rolo.md"],
    ),
    only(category="email"): (["4,200", "Porto", "555", "1990"], ["mara@lindt.example"]),
    hide(category="money"): (["4,200", "4200", "80 EUR"], ["Porto", "31 kg"]),
    hide(note="*"): (["a", "e"], []),
    hide(note="user.md", label="phone"): (["200 300"], ["555", "Tarvale"]),
    hide(note="Rolo", label="keeper"): (["keeper: [[", "dog: [[entities/rolo.md|Rolo"], ["sister: [[", "Porto"]),
}


@pytest.mark.parametrize("rule", HIDES)
def test_the_view_hides_exactly_the_forbidden_facts(rule):
    gone, kept = HIDES[rule]
    everything = "\n".join(FILES.values())
    view = PrivacyFilter([rule], FILES).view
    shown = "\n".join([*view, *view.values()])
    assert [text for text in gone if text not in everything] == []
    assert [text for text in gone if text in shown] == []
    assert [text for text in kept if text not in shown] == []


SAID = {
    hide(**MARAS, label="phone number"): [
        "It is +4 555 010 9999.",
        "4-555-010-9999",
        "45550109999",
        "4 5 5 5 0 1 0 9 9 9 9",
        "(4) 555.010.9999",
    ],
    hide(**MARAS, label="salary"): ["$4,200", "4200 dollars", "USD 4200.00", "She makes 4200.", "4 200"],
    hide(**MARAS, label="birthday"): ["3 May 1990", "May 3rd, 1990", "1990-05-03", "3.5.1990"],
    hide(**MARAS, label="city"): ["Porto", "PORTO", "in *Porto*!"],
    hide(**MARAS, label="allergies"): ["Eggs.", "grass"],
    hide(**MARAS, label="children"): ["She has 3.", "3 children"],
    hide(**MARAS): ["Mara Lindt", "mara_lindt.md", "mara-lindt", "lives in Porto", "mara@lindt.example"],
}


@pytest.mark.parametrize(("rule", "said"), [(rule, said) for rule, all_said in SAID.items() for said in all_said])
def test_hidden_values_in_a_reply_are_redacted_in_every_spelling(rule, said):
    clean = PrivacyFilter([rule], FILES).clean(f"Well: {said} That is it.")
    assert HIDDEN in clean
    assert clean.startswith("Well: ")
    assert clean.endswith("That is it.")
    values = re.findall(r"\d{3,}|porto|eggs|grass|mara", said.casefold())
    assert not any(value in clean.casefold() for value in values)


def test_a_reply_without_hidden_values_is_unchanged():
    text = "Mara Lindt lives in Porto, pays 80 EUR and was born on 4 May 1990."
    assert PrivacyFilter([hide(**MARAS, label="phone number")], FILES).clean(text) == text


def test_a_value_that_another_note_allows_may_be_revealed():
    files = {**FILES, "entities/bo.md": "# Bo\n\n- city: Porto\n"}
    rule = PrivacyFilter([hide(**MARAS, label="city")], files)
    assert "Porto" in rule.view["entities/bo.md"]
    assert "Porto" not in rule.view["entities/mara_lindt.md"]
    assert rule.clean("Bo lives in Porto.") == "Bo lives in Porto."


def test_words_of_a_rule_are_hidden_without_a_labeled_fact():
    files = {
        "user.md": "# Me\n\nI met [[bo.md]].\n",
        "bo.md": "# Bo\n\nHe came into the world in May.\n- weight: 70 kg\n",
    }
    view = PrivacyFilter([hide(note="bo", label="birthday")], files).view
    assert "May" not in view["bo.md"]
    # The label of a birthday in the note is unknown.
    assert "70 kg" not in view["bo.md"]


def test_a_second_rule_cannot_allow_more_than_the_first():
    files = {
        "user.md": "# Me\n\n- friend: [[entities/ada.md|Ada Lind]]\n",
        "entities/ada.md": "# Ada Lind\n\n- city: Bern\n- job: baker\n",
    }
    city, job = only(note="Ada Lind", label="city"), only(note="Ada Lind", label="job")
    note = "entities/ada.md"
    both = PrivacyFilter([json.dumps({"only": [{"label": "city"}, {"label": "job"}]})], files).view[note]
    assert "Bern" in both
    assert "baker" in both
    apart = PrivacyFilter([city, job], files).view[note]
    assert "Bern" not in apart
    assert "baker" not in apart
    assert "Bern" in PrivacyFilter([city, city], files).view[note]


def test_time_grows_with_the_notes_and_not_with_their_square():
    files = {"user.md": "# Me\n"}
    for i in range(1000):
        friend = f"[[n{i * 7 % 1000}|Name Number{i * 7 % 1000}]]"
        body = f"- phone: +1 222 333 {i:04d}\n- city: Bern{i}\n- friend: {friend}\n\nSome prose about it. Call it.\n"
        files[f"e/n{i}.md"] = f"# Name Number{i}\n\n{body}"
    for rule in (HIDE_PHONES, hide(note="Name Number5", label="city")):
        start = process_time()
        one = PrivacyFilter([rule], files)
        # About half a second on one core; in the square of the notes it was minutes.
        assert process_time() - start < 6
        assert len(one.view) == len(files)
        assert ("222 333" in one.view["e/n5.md"]) == ("Number5" in rule)
        assert ("Bern5" in one.view["e/n5.md"]) == ("Number5" not in rule)


@pytest.mark.parametrize(
    "sign",
    [
        "a.",
        "[[",
        "- a: b\n",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ["a", "1 ", "a@", "Aa ", "It is.\n\n"]),
    ],
)
def test_a_long_note_of_one_character_takes_linear_time(sign):
    files = {**FILES, "clip.md": f"# Clip\n\n{sign * (10_000 // len(sign))}\n"}
    for rule in (hide(category="money"), hide(category="date"), hide(**MARAS, label="salary")):
        start = process_time()
        assert PrivacyFilter([rule], files).problem is None
        assert process_time() - start < 4


def test_notes_with_revealing_names_are_renamed():
    files = {
        "user.md": "# Me\n\n- call: [[x/41795550101|the sheet]]\n",
        "x/41795550101.md": "# Sheet\n\n- who: Bo\n",
        "x/other.md": "# Other\n\nSee [[41795550101]].\n",
        "hidden-1.md": "# One of the user's own\n",
    }
    view = PrivacyFilter([HIDE_PHONES], files).view
    assert len(view) == len(files)
    assert "41795550101" not in "\n".join([*view, *view.values()])
    assert view["hidden-1.md"] == files["hidden-1.md"]
    assert "- who: Bo" in "\n".join(view.values())
    assert not {"user.md", "x/other.md"} - set(view)


def test_if_everything_is_hidden_the_reply_is_withheld():
    one = PrivacyFilter([hide(note="*")], FILES)
    assert (one.view, one.clean("Mara lives in Porto.")) == ({}, HIDDEN)
