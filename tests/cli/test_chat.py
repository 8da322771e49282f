"""`posttrain chat`."""

import io

import typer

from posttrain.cli.main import main


def said(capsys, monkeypatch, typed, *words):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["chat", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_model_answers_from_the_conversation(tiny_model, capsys, monkeypatch):
    words = (tiny_model, "--max-tokens", "5", "--temperature", "0")
    twice = said(capsys, monkeypatch, "hello\n\nhello\n", *words)
    again = said(capsys, monkeypatch, "hello\n/new\nhello\n", *words)
    first, second = (text.split("you> ")[1:3] for text in (twice, again))
    assert twice.startswith(f"{tiny_model}: /new starts another conversation")
    assert "[truncated at 5 tokens]" in twice
    assert second[0] == again.split("you> ")[3]  # `/new` forgets the first turn, and greedy answers are equal.
    assert first[0] == second[0]


def test_an_answer_is_printed_while_it_is_sampled_and_cannot_control_the_terminal(tiny_model, capsys, monkeypatch):
    printed, real = [], typer.echo
    with monkeypatch.context() as patch:
        patch.setattr("typer.echo", lambda text, **words: (printed.append(text), real(text, **words)))
        text = said(capsys, patch, "hello\n", tiny_model, "--max-tokens", "12", "--temperature", "0")
    pieces = [piece for piece in printed[1:-2] if piece]
    assert len(pieces) > 3
    assert "".join(pieces) in text
    hostile = "a\x1b[2J\u202eb"
    monkeypatch.setattr("posttrain.data.rendering.Renderer.answer_text", lambda self, ids: hostile[: len(ids)])
    text = said(capsys, monkeypatch, "hello\n", tiny_model, "--max-tokens", "9", "--temperature", "0")
    assert "a\\x1b[2J\\u202eb" in text
    assert "\x1b" not in text


def test_a_run_is_its_exported_model(tiny_model, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("stage: rl\n")
    assert main(["chat", str(run)]) == 2
    assert "has no model yet" in capsys.readouterr().err
    (run / "report.md").touch()
    assert main(["chat", str(run)]) == 2
    assert f"`posttrain rl {run / 'recipe.yaml'} runs=runs name=again`" in capsys.readouterr().err
    (run / "model").symlink_to(tiny_model)
    typed, words = "hello\n", ("--max-tokens", "3", "--system", "Be brief.")
    of_run = said(capsys, monkeypatch, typed, run, *words)
    of_model = said(capsys, monkeypatch, typed, tiny_model, *words)
    assert of_run.partition("\n")[2] == of_model.partition("\n")[2]
