"""The output of a chat in a terminal and line by line, and text that must not reach the terminal."""

import io
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.memory.tests.agent.scripts import NOTES, Script, code, reply, vault
from rich.console import Console

from posttrain.errors import RunError
from posttrain_memory.agent.chat import LineChat, TerminalChat, lines, panel, printable
from posttrain_memory.agent.session import Answered, Code, GaveUp, MemoryAgent, Refused, Result, Thought
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.recipe import AgentRecipe

PHONE = "+41 31 555 01 99"
HIDE = "hide: [{note: Ada, label: phone number}]"
LOOK = code('text = read_file("entities/ada.md")')
MOVE = code('update_file("entities/ada.md", "- city: Bern", "- city: Basel")')
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\b\u202eabc"


@pytest.fixture(scope="module")
def interpreter():
    with Interpreter() as one:
        yield one


@pytest.fixture
def agent(interpreter):
    def made(*script, rules=(), files=None, **settings):
        return MemoryAgent(vault(files), Script(*script), interpreter, AgentRecipe(**settings), rules)

    return made


@pytest.fixture
def terminal(monkeypatch):
    """Type lines to an agent; what is shown. Where they end, Ctrl-D is pressed; an exception is pressed as it is."""

    def run(agent, *typed, colours=False, width=100):
        rest = list(typed)

        def read(prompt=""):
            line = rest.pop(0) if rest else EOFError()
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        shown = io.StringIO()
        TerminalChat(agent, Console(file=shown, width=width, force_terminal=colours)).run("a memory")
        assert not rest, f"it left before {rest}"
        return shown.getvalue()

    return run


def test_panels_of_a_question(agent, terminal):
    shown = terminal(agent("what?", LOOK, reply("In Bern.")), "Where does Ada live?")
    titles = re.findall(r"╭─ (.*?) ─", shown)
    assert titles == ["not understood", "thought", "code", "result", "thought", "reply"]
    for words in ("a memory", "what?", 'read_file("entities/ada.md")', "| - city: Bern", "In Bern."):
        assert words in shown
    assert "<result>" not in shown


def test_time_is_shown_while_the_model_works(agent, terminal):
    shown = terminal(agent(reply("In Bern.")), "Where?", colours=True)
    assert re.search(r"thinking \x1b\[33m0:00:\d\d", shown)


def test_changes_are_shown_and_commands_work(agent, terminal):
    one = agent(MOVE, reply("Noted."), reply("Yes."))
    shown = terminal(one, "Ada moved to Basel.", "/diff", "/undo", "/diff", "/read entities/ada.md", "/notes", "")
    assert shown.count("+- city: Basel") == 2
    assert "undone: entities/ada.md" in shown
    assert "the last question changed nothing" in shown
    assert "\n- city: Bern" in shown.partition("undone")[2]
    assert "entities/" in shown
    assert one.vault.files() == NOTES
    shown = terminal(one, "/new", "/filters", "/help", "/what", "/read", "/read no.md", "/read ../x", "/undo", "/quit")
    for words in ("new conversation", "no privacy rule", "/undo  ", "unknown command /what", "/read user.md"):
        assert words in shown
    assert "there is no note 'no.md'" in shown
    assert "nothing to undo" in shown


def test_ctrl_c_interrupts_an_answer_and_then_leaves(agent, terminal):
    one = agent(MOVE, KeyboardInterrupt(), reply("In Basel."))
    shown = terminal(one, "Ada moved.", "Where?", KeyboardInterrupt())
    assert shown.index("+- city: Basel") < shown.index("interrupted") < shown.index("In Basel.")
    assert len(one._chat_client.log) == 2


def test_errors_are_shown_and_the_chat_continues(agent, terminal):
    one = agent(RunError("the model m at u cannot be reached"), reply("Hello."))
    shown = terminal(one, "Hi?", "Hi?")
    assert "cannot be reached" in shown
    assert "Hello." in shown


def test_text_is_never_markup(agent, terminal):
    shown = terminal(
        agent(code("a = '[bold]'", thought="[red]x[/red] :smile: [/]"), reply("[link=http://x]y[/link]")), "?"
    )
    for words in ("[red]x[/red] :smile: [/]", "[bold]", "[link=http://x]y[/link]"):
        assert words in shown


# -- what steers a terminal -------------------------------------------------------------------------------------------

EVENTS = {
    "thought": Thought,
    "code": Code,
    "result": Result,
    "refused": lambda text: Refused(text, text),
    "said": lambda text: Answered(text, True),
    "gave up": GaveUp,
}


def harmless(text):
    return all(sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Co") for sign in text)


@given(st.text(st.characters(), max_size=60))
def test_visible_text_contains_no_terminal_controls(text):
    assert harmless(printable(text))
    assert printable(printable(text)) == printable(text)


def test_visible_text_is_otherwise_unchanged():
    assert printable("naïve 日本 €\r\n\tx") == "naïve 日本 €\n\tx"
    assert printable("a\x1b[2J\u202eb") == r"a\x1b[2J\u202eb"


@pytest.mark.parametrize("kind", EVENTS)
@given(text=st.text(st.sampled_from([*ESCAPE, "\n", "x", "[", "\ud800", "\U000e0041", "\u200b"]), max_size=40))
def test_no_event_steers_the_terminal(kind, text):
    shown = io.StringIO()
    Console(file=shown, width=60).print(panel(EVENTS[kind](text)))
    assert harmless(shown.getvalue())
    assert harmless(lines(EVENTS[kind](text)))


def test_escapes_of_a_model_and_of_notes_do_not_reach_the_terminal(agent, terminal, capsys):
    def script():
        return (
            f"nonsense {ESCAPE}",
            code(f"x = '{ESCAPE}'\ny = read_file('user.md')", thought=ESCAPE),
            code("append_file('user.md', '\\x1b[31m')"),
            RunError(f"the server said {ESCAPE}"),
            reply(f"it {ESCAPE} is"),
        )

    files = {**NOTES, "user.md": f"# User {ESCAPE}\n"}
    asked = "Hi?", "/diff", "/read user.md", f"/{ESCAPE}", f"/read {ESCAPE}.md", "Hi?"
    assert harmless(terminal(agent(*script(), files=files), *asked))
    one = LineChat(agent(*script(), files=files))
    with pytest.raises(RunError):
        one.run(asked)
    with pytest.raises(RunError):
        one.run(asked[1:])
    printed = capsys.readouterr()
    assert "owned" in printed.out
    assert harmless(printed.out + printed.err)


# -- privacy ----------------------------------------------------------------------------------------------------------


def test_no_panel_shows_hidden_facts(agent, terminal):
    told = [code(f"x = '{PHONE}'", thought=f"{PHONE}?"), f"it is {PHONE}", LOOK, reply(f"It is {PHONE}.")]
    shown = terminal(
        agent(*told, rules=[HIDE]),
        "Ada's phone number?",
        "/read entities/ada.md",
        "/notes",
        "/diff",
        "/filters",
        "/help",
    )
    assert PHONE not in shown
    assert "555" not in shown
    assert "[hidden]" in shown
    assert "the privacy rules hide something" in shown
    assert f"- {HIDE}" in shown


def test_facts_hidden_in_one_question_do_not_appear_in_the_next(agent, terminal):
    one = agent(LOOK, reply("Seen."), LOOK, reply(f"{PHONE}"), reply("Hm."))
    shown = terminal(one, "What do you know?", f"And her number? <filter>{HIDE}</filter>", "Thanks.")
    assert shown.count(PHONE) == 1  # the result of the first question
    assert [PHONE in str(conversation) for conversation in one._chat_client.log] == [True, True, False]


# -- line by line -----------------------------------------------------------------------------------------------------


def test_replies_go_to_stdout_and_the_rest_to_stderr(agent, capsys):
    LineChat(agent(LOOK, reply("In Bern."), MOVE, reply("Noted."))).run(
        [
            "Where does Ada live?\n",
            "\n",
            "She moved to Basel.\n",
            "/read entities/ada.md",
            "/undo",
            "/quit",
            "never asked",
        ]
    )
    printed = capsys.readouterr()
    told = printed.out.splitlines()
    assert told[:2] == ["In Bern.", "Noted."]
    assert "- city: Basel" in told
    assert told[-1].startswith("undone")
    for words in ("thought | look", 'code | text = read_file("entities/ada.md")', "result | | - city: Bern"):
        assert words in printed.err.splitlines()
    assert "notes were changed" in printed.err


def test_lines_without_an_answer_are_counted(agent, capsys):
    one = agent("no", "no", reply("Hello."), max_turns=2)
    with pytest.raises(RunError, match="3 of 4 lines had no answer"):
        LineChat(one).run(["Hi?", "/nothing", "<filter>x</filter>", "Hi?"])
    printed = capsys.readouterr()
    assert printed.out == "Hello.\n"
    assert "no reply | no reply within 2 messages" in printed.err
    assert "unknown command /nothing" in printed.err


def test_a_fault_ends_a_script(agent, capsys):
    one = agent(RunError("gone"), reply("Hello."))
    with pytest.raises(RunError, match="gone"):
        LineChat(one).run(["Hi?", "Hi?"])
    assert capsys.readouterr().out == ""
