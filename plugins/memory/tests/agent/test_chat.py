"""The output of a chat in a terminal and line by line, and text that must not reach the terminal."""

import io
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.memory.tests.agent.scripts import HIDE, LOOK, MOVE, NOTES, PHONE, code, reply
from rich.console import Console

from posttrain.errors import RunError
from posttrain_memory.agent.chat import _COLORS, answer_lines, chat, panel, printable
from posttrain_memory.agent.session import Event

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\b\u202eabc"


@pytest.fixture
def terminal(monkeypatch):
    """Type lines to an agent; what is shown. Where they end, Ctrl-D is pressed; an exception is pressed as it is."""

    def run(agent, *typed, colours=False):
        rest = list(typed)

        def read(prompt=""):
            line = rest.pop(0) if rest else EOFError()
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        shown = io.StringIO()
        chat(agent, Console(file=shown, width=100, force_terminal=colours), "a memory")
        assert not rest, f"it left before {rest}"
        return shown.getvalue()

    return run


def test_panels_of_a_question(agent, terminal):
    told = code("a = '[bold]'", thought="[red]x[/red] :smile: [/]"), LOOK, reply("In [link=http://x]y[/link] Bern.")
    shown = terminal(agent("what?", *told), "Where does Ada live?")
    titles = ["not understood", *["thought", "code", "result"] * 2, "thought", "reply"]
    assert re.findall(r"╭─ (.*?) ─", shown) == titles
    # No text is markup.
    texts = "[red]x[/red] :smile: [/]", "[bold]", "[link=http://x]y[/link] Bern."
    for words in ("a memory", "what?", 'read_file("entities/ada.md")', "| - city: Bern", *texts):
        assert words in shown
    assert "<result>" not in shown
    assert re.search(r"thinking \x1b\[33m0:00:\d\d", terminal(agent(reply("In Bern.")), "Where?", colours=True))


def test_changes_are_shown_and_commands_work(agent, terminal):
    one = agent(MOVE, reply("Noted."), reply("Yes."))
    shown = terminal(one, "Ada moved to Basel.", "/diff", "/undo", "/diff", "/read entities/ada.md", "/notes", "")
    assert shown.count("+- city: Basel") == 2
    for words in ("undone: entities/ada.md", "the last question changed nothing", "entities/"):
        assert words in shown
    assert "\n- city: Bern" in shown.partition("undone")[2]
    assert one.vault.files() == NOTES
    shown = terminal(one, "/new", "/filters", "/help", "/what", "/read", "/read no.md", "/read ../x", "/undo", "/quit")
    for words in ("new conversation", "no privacy rule", "/undo  ", "unknown command /what", "/read user.md"):
        assert words in shown
    assert "there is no note 'no.md'" in shown
    assert "nothing to undo" in shown


def test_interrupts_and_errors_end_an_answer_and_not_the_chat(agent, terminal):
    one = agent(MOVE, KeyboardInterrupt(), RunError("the model m at u cannot be reached"), reply("In Basel."))
    shown = terminal(one, "Ada moved.", "Hi?", "Where?", KeyboardInterrupt())
    order = "+- city: Basel", "interrupted", "cannot be reached", "In Basel."
    assert sorted(map(shown.index, order)) == list(map(shown.index, order))
    assert len(one._chat_client.log) == 3


# -- what steers a terminal -------------------------------------------------------------------------------------------


def harmless(text):
    return all(sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Co") for sign in text)


@given(st.text(st.characters(), max_size=60))
def test_visible_text_contains_no_terminal_controls(text):
    assert harmless(printable(text))
    assert printable(printable(text)) == printable(text)
    assert printable("naïve 日本 €\r\n\tx a\x1b[2J\u202eb") == "naïve 日本 €\n\tx a\\x1b[2J\\u202eb"


@pytest.mark.parametrize("kind", _COLORS)
@given(text=st.text(st.sampled_from([*ESCAPE, "\n", "x", "[", "\ud800", "\U000e0041", "\u200b"]), max_size=40))
def test_no_event_steers_the_terminal(kind, text):
    shown = io.StringIO()
    Console(file=shown, width=60).print(panel(Event(kind, text, text)))
    assert harmless(shown.getvalue())


def test_escapes_of_a_model_and_of_notes_do_not_reach_the_terminal(agent, terminal, capsys):
    script = (
        f"nonsense {ESCAPE}",
        code(f"x = '{ESCAPE}'\ny = read_file('user.md')", thought=ESCAPE),
        code("append_file('user.md', '\\x1b[31m')"),
        RunError(f"the server said {ESCAPE}"),
        reply(f"it {ESCAPE} is"),
    )
    files = {**NOTES, "user.md": f"# User {ESCAPE}\n"}
    asked = "Hi?", "/diff", "/read user.md", f"/{ESCAPE}", f"/read {ESCAPE}.md", "Hi?"
    assert harmless(terminal(agent(*script, files=files), *asked))
    one = agent(*script, files=files)
    for lines in (asked, asked[1:]):
        with pytest.raises(RunError):
            answer_lines(one, lines)
    printed = capsys.readouterr()
    assert "owned" in printed.out
    assert harmless(printed.out + printed.err)


# -- privacy ----------------------------------------------------------------------------------------------------------


def test_no_panel_shows_hidden_facts(agent, terminal):
    told = [code(f"x = '{PHONE}'", thought=f"{PHONE}?"), f"it is {PHONE}", LOOK, reply(f"It is {PHONE}.")]
    commands = "/read entities/ada.md", "/notes", "/diff", "/filters", "/help"
    shown = terminal(agent(*told, rules=[HIDE]), "Ada's phone number?", *commands)
    assert PHONE not in shown
    assert "555" not in shown
    for words in ("[hidden]", "the privacy rules hide something", f"- {HIDE}"):
        assert words in shown


def test_facts_hidden_in_one_question_do_not_appear_in_the_next(agent, terminal):
    one = agent(LOOK, reply("Seen."), LOOK, reply(f"{PHONE}"), reply("Hm."))
    shown = terminal(one, "What do you know?", f"And her number? <filter>{HIDE}</filter>", "Thanks.")
    assert shown.count(PHONE) == 1  # the result of the first question
    assert [PHONE in str(conversation) for conversation in one._chat_client.log] == [True, True, False]


# -- line by line -----------------------------------------------------------------------------------------------------


def test_replies_go_to_stdout_and_the_rest_to_stderr(agent, capsys):
    lines = "Where does Ada live?\n", "\n", "She moved to Basel.\n", "/read entities/ada.md", "/undo", "/quit", "never"
    answer_lines(agent(LOOK, reply("In Bern."), MOVE, reply("Noted.")), lines)
    printed = capsys.readouterr()
    told = printed.out.splitlines()
    assert told[:2] == ["In Bern.", "Noted."]
    assert "- city: Basel" in told
    assert told[-1].startswith("undone")
    for words in ("thought", "look", 'text = read_file("entities/ada.md")', "| - city: Bern", "notes were changed"):
        assert words in printed.err


def test_lines_without_an_answer_are_counted_and_a_fault_ends_a_script(agent, capsys):
    one = agent("no", "no", reply("Hello."), max_turns=2)
    with pytest.raises(RunError, match="3 of 4 lines had no answer"):
        answer_lines(one, ["Hi?", "/nothing", "<filter>x</filter>", "Hi?"])
    printed = capsys.readouterr()
    assert printed.out == "Hello.\n"
    assert "no reply within 2 messages" in printed.err
    assert "unknown command /nothing" in printed.err
    with pytest.raises(RunError, match="gone"):
        answer_lines(agent(RunError("gone"), reply("Hello.")), ["Hi?", "Hi?"])
    assert capsys.readouterr().out == ""
