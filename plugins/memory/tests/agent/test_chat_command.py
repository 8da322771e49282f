"""`posttrain memory chat` as it is started: piped lines, a terminal, and everything that can be wrong at the start."""

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import pytest
from plugins.memory.tests.agent.scripts import HIDE, LOOK, MOVE, NOTES, PHONE, code, reply
from plugins.memory.tests.agent.servers import serving, turns

from posttrain.cli.main import main
from posttrain_memory.agent.opening import open_vault
from posttrain_memory.vault.storage import DiskStorage

START = [sys.executable, "-c", "import sys; from posttrain.cli.main import main; sys.exit(main())", "memory", "chat"]
PATIENCE = 120


def piped(*words, typed="", **variables):
    """The command with lines on standard input."""
    return subprocess.run(
        [*START, *map(str, words)],
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **variables},
    )


def wrong(capsys, *words):
    """The output of the command before it prompts; it must be one sentence for the user."""
    assert main(["memory", "chat", *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (sentence,) = printed.err.splitlines()
    return sentence


def test_lines_are_answered_and_notes_are_changed_on_disk(notes):
    with serving(turns(LOOK, MOVE, reply("Noted."))) as server:
        words = notes, "--url", server.url, "--model", "m", "--temperature", 0
        done = piped(*words, typed="Ada moved to Basel.\n/read entities/ada.md\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "Noted."
    assert "- city: Basel" in done.stdout
    assert "- city: Basel" in (notes / "entities/ada.md").read_text()
    assert "update_file" in done.stderr
    assert server.asked[0]["temperature"] == 0
    assert "You have 8 messages in all" in server.asked[0]["messages"][0]["content"]


@pytest.mark.slow
def test_settings_reach_the_model(notes):
    with serving(lambda _: "<reply>Yes.</reply>") as server:
        words = "--url", server.url, "--model", "m", "--no-thinking", "--prompt", "brief", "--max-turns", 3
        done = piped(notes, *words, "--key", "KEY", typed="Hi?\n", KEY="secret")
    assert (done.returncode, done.stdout) == (0, "Yes.\n")
    system = server.asked[0]["messages"][0]["content"]
    assert "You have 3 messages" in system
    assert "<think>" not in system
    assert len(system) < 1_000


@pytest.mark.slow
@pytest.mark.parametrize("of_the_vault", [False, True])
def test_a_rule_applies_to_every_line(notes, of_the_vault):
    if of_the_vault:
        (notes / "privacy.yaml").write_text(f"{HIDE}\nto: chat\n---\nhide: [{{label: dog}}]\nto: mcp\n")
    with serving(turns(LOOK, reply(f"It is {PHONE}."))) as server:
        words = "--url", server.url, "--model", "m", *(() if of_the_vault else ("--filter", HIDE))
        done = piped(notes, *words, typed="Ada's phone number?\nReally?\n/read entities/ada.md\n")
    assert done.returncode == 0, done.stderr
    told = [m["content"] for body in server.asked for m in body["messages"] if m["role"] != "assistant"]
    assert PHONE not in done.stdout + done.stderr + str(told)
    assert "- dog: Rufus" in str(told)
    assert done.stdout.count("It is [hidden].") == 2


@pytest.mark.slow
def test_a_read_only_vault(notes):
    with serving(turns(MOVE, reply("I cannot."))) as server, closing(DiskStorage(notes)):
        done = piped(notes, "--url", server.url, "--model", "m", "--read-only", typed="Ada moved.\n")
    assert done.returncode == 0, done.stderr
    assert "the memory is read-only" in done.stderr
    assert (notes / "entities/ada.md").read_text() == NOTES["entities/ada.md"]


@pytest.mark.slow
def test_a_new_memory_is_filled(tmp_path):
    script = code('append_file("user.md", "- name: Kim\\n")'), reply("Hello Kim.")
    with serving(turns(*script)) as server:
        done = piped(tmp_path / "a/b", "--new", "--url", server.url, "--model", "m", typed="I am Kim.\n")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a/b/user.md").read_text() == "# User\n- name: Kim\n"


@pytest.mark.slow
def test_a_local_model_chats(notes, tiny_model):
    done = piped(notes, "--model", tiny_model, "--prompt", "brief", "--max-turns", 2, typed="Where does Ada live?\n")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "not understood" in done.stderr
    assert "posttrain: 1 of 1 lines had no answer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_server_that_is_down(notes):
    with serving(lambda _: "") as server:
        pass
    done = piped(notes, "--url", server.url, "--model", "m", typed="Hi?\nHi?\n")
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert "check that the server is running" in sentence


def test_missing_arguments_are_one_sentence(notes, tmp_path, capsys, monkeypatch):
    with_url = "--url", "http://localhost:9/v1", "--model", "m"
    assert "there is no folder" in wrong(capsys, tmp_path / "no", *with_url)
    (tmp_path / "file").write_text("x")
    assert "there is no folder" in wrong(capsys, tmp_path / "file", *with_url)
    assert "cannot be created" in wrong(capsys, tmp_path / "file", "--new", *with_url)
    (tmp_path / "empty").mkdir()
    assert "has no user.md" in wrong(capsys, tmp_path / "empty", *with_url)
    assert not (tmp_path / "empty/user.md").exists()
    assert "cannot be combined with --read-only" in wrong(capsys, notes, "--new", "--read-only", *with_url)
    assert "--model PATH" in wrong(capsys, notes)
    assert "is not a model directory" in wrong(capsys, notes, "--model", tmp_path / "empty")
    assert "--key requires --url" in wrong(capsys, notes, "--model", "m", "--key", "X")
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    assert "which is not set" in wrong(capsys, notes, *with_url, "--key", "NO_KEY_HERE")
    assert "is not a server address" in wrong(capsys, notes, "--url", "localhost:8000", "--model", "m")
    assert "not understood" in wrong(capsys, notes, *with_url, "--filter", "Be so kind as to sing.")
    assert "--opened-by has no effect" in wrong(capsys, notes, *with_url, "--no-thinking", "--opened-by", "template")
    # After any failure, the memory is unlocked again, and creating an existing vault changes nothing.
    open_vault(notes, new=True).close()
    assert (notes / "user.md").read_text() == NOTES["user.md"]


def test_a_vault_that_another_process_writes(notes, capsys):
    with closing(DiskStorage(notes)):
        said = wrong(capsys, notes, "--url", "http://localhost:9/v1", "--model", "m")
    assert f"is being written by process {os.getpid()}" in said
    assert "read-only" in said


def test_a_note_that_cannot_be_read_stops_rules_in_one_sentence(notes, capsys):
    (notes / "entities/odd.md").write_bytes(b"\xff\xfe")
    words = "--url", "http://localhost:9/v1", "--model", "m", "--filter", HIDE
    assert main(["memory", "chat", str(notes), *words]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "odd.md" in sentence
    assert "correct or move" in sentence


def test_in_a_terminal_ctrl_c_interrupts_an_answer_and_ctrl_d_leaves(notes):
    asked, interrupted = threading.Event(), threading.Event()

    def answer(messages):
        if "wait" in messages[-1]["content"]:
            asked.set()
            interrupted.wait(5)  # on some systems the signal waits for the answer
        return reply("Hello \x1b]0;owned\x07 there.")

    with serving(answer) as server, in_terminal(notes, "--url", server.url, "--model", "m") as (until, press):
        until("Ctrl-D leaves")
        press("please wait\r")
        until("thinking")
        assert asked.wait(60)
        press("\x03")
        until("interrupted")
        interrupted.set()
        press("Hi?\r")
        shown = until("there.")
        assert "\x1b]0;owned" not in shown
        press("/notes\r")
        until("ada.md")
        # Input before the prompt appears may be discarded with the line that was typed before.
        until("> ")
        press("\x04")
        until(None)


@contextmanager
def in_terminal(*words):
    """The command in a separate terminal: `until` reads until a text has come (or the end), `press` types."""
    child, terminal = pty.fork()
    if not child:
        # Where the tests run in the background of a shell, SIGINT is ignored, and that is inherited.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(START[0], [*START, *map(str, words)], {**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    seen = ""

    def until(text):
        nonlocal seen
        end = time.monotonic() + PATIENCE
        while text is None or text not in seen:
            ready = select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"{text} has not come after {seen!r}"
            try:
                data = os.read(terminal, 10_000)
            except OSError:  # Linux says so where the other side of a terminal is closed
                data = b""
            if not data:
                assert text is None, f"it ended without {text}: {seen!r}"
                return seen
            seen += data.decode(errors="replace")
        before, _, seen = seen.partition(text)
        return before + text

    try:
        yield until, lambda keys: os.write(terminal, keys.encode())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = 0
    finally:
        if child:
            os.kill(child, 9)
            os.waitpid(child, 0)
        os.close(terminal)
