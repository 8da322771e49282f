"""The memory agent's session: events, conversations, undo, privacy rules, and faults that are not the model's."""

import errno
from contextlib import closing, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plugins.memory.tests.agent.scripts import HIDE, LOOK, NOTES, PHONE, Script, code, reply

from posttrain.errors import InputError, RunError
from posttrain_memory.agent.clients import ContextFull
from posttrain_memory.agent.session import Event, MemoryAgent
from posttrain_memory.interpreter.pool import InterpreterFault
from posttrain_memory.vault.limits import VaultLimits
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.vault import Vault

NOTE = code('append_file("user.md", "- x: 1\\n")')


def asked(agent, question="Where does Ada live?"):
    return list(agent.ask(question))


def test_events_of_a_question(agent):
    one = agent("hello", reply("  "), LOOK, reply(" In Bern. "))
    first, second, *rest = asked(one)
    assert (first.kind, first.message) == ("not understood", "hello")
    assert "</think>" in first.text
    assert second.kind == "not understood"  # an empty reply is never returned
    text = NOTES["entities/ada.md"].strip().replace("\n", "\n| ").replace("| \n", "|\n")
    assert rest == [
        Event("thought", "look"),
        Event("code", 'text = read_file("entities/ada.md")'),
        Event("result", f"<result>\ntext =\n| {text}\n</result>"),
        Event("thought", "done"),
        Event("reply", "In Bern."),
    ]
    assert one._chat_client.heard().count("nothing was run") == 2


def test_turns_run_out(agent):
    one = agent(*[NOTE] * 3, max_turns=3)
    events = asked(one)
    assert events[-1] == Event("no reply", "no reply within 3 messages; ask again, or ask for less at once")
    assert [event.kind for event in events].count("result") == 2
    # As in training, code of the last message does not run, because its result would not be shown.
    assert one.vault.read("user.md").count("- x: 1") == 2
    assert "This is your last message" in events[-4].text
    assert asked(agent("no", "no", max_turns=2))[-1].text.startswith("no reply within 2 messages")


def test_the_conversation_continues_until_it_ends(agent):
    one = agent(reply("Which Ada?"), reply("In Bern."), reply("Hm."))
    asked(one)
    asked(one, "The one with the dog.")
    (conversation,) = one._chat_client.log
    assert [message["role"] for message in conversation] == ["system", "user", "assistant", "user", "assistant"]
    assert conversation[3]["content"] == "The one with the dog."
    one.new()
    asked(one, "Again?")
    assert [message["role"] for message in one._chat_client.log[1]] == ["system", "user", "assistant"]


@pytest.mark.parametrize("first", [["no", "no"], [ContextFull("full")], [RunError("gone")]], ids=str)
def test_after_a_question_without_a_reply_a_new_conversation_begins(agent, first):
    one = agent(*first, reply("In Bern."), max_turns=2)
    with suppress(RunError):
        asked(one)
    assert asked(one)[-1] == Event("reply", "In Bern.")
    assert len(one._chat_client.log) == 2


def test_an_interrupted_question_is_forgotten_and_its_changes_can_be_undone(agent):
    one = agent(NOTE, KeyboardInterrupt(), reply("ok"))
    with pytest.raises(KeyboardInterrupt):
        asked(one)
    assert one.changes()
    assert one.undo() == ["user.md"]
    assert one.vault.files() == NOTES
    asked(one)
    assert len(one._chat_client.log) == 2
    with closing(one.ask("stopped by whoever listens")) as events:
        one._chat_client.script = [reply("never heard")]
        next(events)
    one._chat_client.script = [reply("ok")]
    asked(one)
    assert len(one._chat_client.log) == 3


def test_the_opening_is_prefilled_as_in_training(agent):
    one = agent(reply("ok"), opened_by="environment")
    asked(one)
    assert one._chat_client.primers == ["<think>"]
    with pytest.raises(InputError, match="question is empty"):
        asked(one, "<filter>hide it</filter>  ")


@pytest.mark.parametrize("mark", ["<|im_start|>assistant", "</result>", "<think>", "[INST]", "<reply>x</reply>"])
def test_questions_cannot_start_a_turn(agent, mark):
    one = agent(reply("a"), reply("b"))
    asked(one, f"first {mark}")
    asked(one, f"second {mark}")
    users = [message["content"] for message in one._chat_client.log[0] if message["role"] == "user"]
    assert len(users) == 2
    assert not any(mark in said for said in users)


# -- undo and diff ----------------------------------------------------------------------------------------------------


CHANGE = (
    'update_file("entities/ada.md", "- city: Bern", "- city: Basel")\n'
    'create_file("entities/bo.md", "# Bo\\n")\n'
    'move_file("entities/bo.md", "entities/bob.md")\n'
    'create_file("old.md", "# Old\\n")\n'
    'delete_file("old.md")\n'
    'update_file("user.md", "- friend: [[entities/ada.md]]\\n", "")'
)


def test_undo_reverts_all_changes_of_a_question(agent):
    one = agent(code(CHANGE), code('append_file("user.md", "# New\\n")'), reply("ok"), reply("nothing to do"))
    asked(one, "Ada moved.")
    assert set(one.vault.paths()) == {"entities/ada.md", "entities/bob.md", "user.md"}
    diff = one.changes()
    assert "-- city: Bern\n+- city: Basel\n" in diff
    assert "+# New\n" in diff
    assert "bo.md" not in diff
    asked(one, "Thanks.")
    assert one.changes() == ""
    assert one.undo() == ["entities/ada.md", "entities/bob.md", "user.md"]
    assert one.vault.files() == NOTES
    with pytest.raises(InputError, match="nothing to undo"):
        one.undo()


def test_changes_of_others_are_not_undone(agent):
    one = agent(code('append_file("user.md", "- n: 1\\n")\ncreate_file("a.md", "# A")'), reply("ok"))
    asked(one, "Note it.")
    one.vault._storage.write("user.md", "edited elsewhere")
    with pytest.raises(InputError, match=r"'user\.md' was changed outside of the journal"):
        one.undo()
    assert one.vault.exists("a.md")
    assert one.vault.read("user.md") == "edited elsewhere"


def test_operations_that_the_journal_dropped_are_not_partly_undone(agent):
    many = "\n".join(f'append_file("user.md", "- n: {n}")' for n in range(5))
    one = agent(code(many), reply("ok"), code(many), reply("ok"), limits=VaultLimits(journal_entries=3))
    for _ in range(2):
        asked(one, "Note it.")
        assert "more was changed" in one.changes()
        with pytest.raises(InputError, match="nothing to undo"):
            one.undo()


def test_undo_on_disk_outlives_the_session(notes, shared_interpreter):
    for _ in range(2):
        one = MemoryAgent(Vault(DiskStorage(notes)), Script(code(CHANGE), reply("ok")), shared_interpreter)
        asked(one, "Ada moved.")
        assert (notes / "user.md").read_text() == "# User\n\n- name: Kim Vale\n"
        one.undo()
        one.close()
        assert {path: (notes / path).read_text() for path in NOTES} == NOTES
        assert not (notes / "entities/bob.md").exists()


_PATHS = st.sampled_from(["user.md", "a.md", "b/c.md"])
_STEPS = st.one_of(
    st.builds("create_file({!r}, '# {}')".format, _PATHS, st.integers(0, 3)),
    st.builds("append_file({!r}, '- n: {}')".format, _PATHS, st.integers(0, 3)),
    st.builds("update_file({!r}, '- n: {}', 'x')".format, _PATHS, st.integers(0, 3)),
    st.builds("delete_file({!r})".format, _PATHS),
    st.builds("move_file({!r}, {!r})".format, _PATHS, _PATHS),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(_STEPS, min_size=1, max_size=5), min_size=1, max_size=4))
def test_undo_leads_back_through_every_state(agent, questions):
    one = agent(*[part for steps in questions for part in (*map(code, steps), reply("ok"))])
    states = [one.vault.files()]
    for _ in questions:
        asked(one, "Do it.")
        assert bool(one.changes()) == (one.vault.files() != states[-1])
        if one.changes():
            states.append(one.vault.files())
    for before in reversed(states[:-1]):
        one.undo()
        assert one.vault.files() == before
    with pytest.raises(InputError):
        one.undo()


# -- privacy ----------------------------------------------------------------------------------------------------------


def test_standing_rules_apply_to_every_question_and_every_event(agent):
    look = code('text = read_file("entities/ada.md")', thought=f"is it {PHONE}?")
    one = agent(look, reply(f"It is {PHONE}."), look, reply("Rufus."), rules=[HIDE])
    events = asked(one, "What is Ada's phone number?") + asked(one, "And her dog?")
    assert PHONE not in str(events)
    assert "Rufus" in str(events)
    assert events[4].withheld
    assert not events[-1].withheld
    users = [m["content"] for m in one._chat_client.log[0] if m["role"] == "user"]
    assert users[0].endswith(f"<filter>{HIDE}</filter>")
    assert f"<filter>{HIDE}</filter>" in users[2]
    assert PHONE not in "".join(users)


def test_notes_cannot_be_changed_under_a_rule(agent):
    one = agent(code('append_file("user.md", "- x: 1")'), reply("ok"), rules=[HIDE])
    events = asked(one)
    assert "notes cannot be changed while a privacy rule holds" in events[2].text
    assert one.vault.files() == NOTES
    assert one.changes() == ""


def test_earlier_conversation_does_not_leak_into_a_question_with_a_rule(agent):
    one = agent(LOOK, reply("Bern."), LOOK, reply("I may not say."), LOOK, reply("Yes."), reply("Hm."))
    asked(one)
    assert PHONE in one._chat_client.heard()
    asked(one, f"Her number? <filter>{HIDE}</filter>")
    assert len(one._chat_client.log) == 2
    assert PHONE not in one._chat_client.heard()
    # The rule was for that question alone, and so was its conversation.
    asked(one, "And now?")
    assert len(one._chat_client.log) == 3
    assert PHONE in one._chat_client.heard()
    assert "<filter>" not in one._chat_client.heard()
    asked(one, "Go on.")
    assert len(one._chat_client.log) == 3


def test_rules_of_a_question_add_to_the_standing_ones(agent):
    one = agent(LOOK, reply(f"{PHONE}, Rufus"), rules=[HIDE])
    events = asked(one, "All about Ada? <filter>hide: [{note: Ada, label: dog}]</filter>")
    assert PHONE not in str(events)
    assert "Rufus" not in str(events)
    assert "Bern" in str(events)


def test_an_unknown_rule_denies_all_access(agent):
    one = agent()
    (event,) = asked(one, "Where? <filter>Be so kind as to sing.</filter>")
    assert event.kind == "no reply"
    assert "sing" in event.text
    with pytest.raises(InputError, match="not understood"):
        agent(rules=["Be so kind as to sing."])


def test_code_and_commands_show_only_what_the_rules_allow(agent):
    one = agent(code(f'x = "{PHONE}"'), f"<think>t</think>nonsense {PHONE}", reply("ok"), rules=[HIDE])
    assert PHONE not in str(asked(one))
    assert PHONE not in one.visible_vault().read("entities/ada.md")
    assert PHONE in agent().visible_vault().read("entities/ada.md")


# -- faults -----------------------------------------------------------------------------------------------------------


def _raising(error):
    def fails(*_, **__):
        raise error

    return fails


def test_faults_unrelated_to_the_model_are_one_sentence(agent, monkeypatch):
    one = agent(NOTE, NOTE)
    with monkeypatch.context() as patch:
        patch.setattr(one._interpreter, "run", _raising(InterpreterFault("the interpreter does not start")))
        with pytest.raises(RunError, match="does not start"):
            asked(one)
        patch.undo()
        patch.setattr(MemoryStorage, "write", _raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(RunError, match="No space left"):
            asked(one)
    assert one.vault.files() == NOTES
