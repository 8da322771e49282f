"""`posttrain data documents`: prompts, conversations and pairs from a folder of texts, with a teacher, a judge, or models here."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as parquet
import pytest

from posttrain.cli.main import main
from posttrain.data.documents import Document, Sampled, read_documents, split_documents
from posttrain.documents import best_of
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction
from posttrain.models.reward import RewardModel
from tests.evaluation.judge_server import serving as judging
from tests.rollout.chat_server import Reply, serving

COMMAND = [sys.executable, "-c", "import sys; from posttrain.cli.main import main; sys.exit(main(sys.argv[1:]))"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Ten rules of a house as documents, in two folders, and a template."""
    monkeypatch.chdir(tmp_path)
    for number in range(10):
        file = tmp_path / "rules" / ("floor" if number % 2 else "garden") / f"rule{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"Rule {number}: close the gate {{name}}.\n")
    (tmp_path / "rules" / ".hidden").write_text("x")
    (tmp_path / "template.txt").write_text("How is {document} done? {braces} {name}\n")
    return tmp_path


def words(*more, out="data"):
    return ["data", "documents", "rules", "--template", "template.txt", "--out", out, *more]


def rows(file):
    return parquet.read_table(file).to_pylist()


def test_prompts_are_filled_once_and_split_by_document(folder, capsys):
    assert main(words("--val", "2", "--test", "0.3", "--name", "mine")) == 0
    found = {split: rows(f"data/prompts/mine_prompts_{split}.parquet") for split in ("train", "val", "test")}
    assert [len(of_split) for of_split in found.values()] == [5, 2, 3]
    prompts = {row["document"]: row["context_messages"] for of_split in found.values() for row in of_split}
    assert len(prompts) == 10
    assert prompts["garden/rule0.txt"] == [
        {
            "role": "user",
            "content": "How is Rule 0: close the gate {name}. done? {braces} garden/rule0.txt",
        }
    ]
    assert not (folder / "data" / "sft").exists()
    assert "data/prompts/mine_prompts_val.parquet: 2 rows" in capsys.readouterr().out
    documents = [Document(f"{n}", f"prompt {n}", None) for n in range(40)]
    splits = split_documents(documents, 0.1, 0.2)
    assert splits == split_documents(documents[::-1], 0.1, 0.2)
    assert [list(splits.values()).count(split) for split in ("train", "val", "test")] == [28, 4, 8]


def test_written_answers_become_conversations(folder, capsys):
    (folder / "answers" / "floor").mkdir(parents=True)
    (folder / "answers" / "floor" / "rule1.md").write_text("Slowly.\n")
    assert main(words("--answers", "answers", "--val", "0", "--test", "0")) == 0
    assert rows("data/sft/rationales_sft_train.parquet") == [
        {
            "messages": [
                {"role": "user", "content": "How is Rule 1: close the gate {name}. done? {braces} floor/rule1.txt"},
                {"role": "assistant", "content": "Slowly."},
            ],
            "document": "floor/rule1.txt",
        }
    ]
    prompts = rows("data/prompts/rationales_prompts_train.parquet")
    assert [row["completion"] for row in prompts].count("Slowly.") == 1
    assert main(["data", "inspect", "data/sft/rationales_sft_train.parquet", "--rows", "0"]) == 0
    assert "1 usable rows" in capsys.readouterr().out


def test_a_part_without_answers_is_named(folder, capsys):
    splits = split_documents(read_documents(folder / "rules", folder / "template.txt"), 2, 0)
    for name in (name for name, split in splits.items() if split == "train"):
        file = folder / "answers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("Slowly.\n")
    assert main(words("--answers", "answers", "--val", "2", "--test", "0")) == 0
    assert "no sft rows for val: none of its 2 documents has an answer" in capsys.readouterr().out


def answer(name, text, sample=0, cut_off=False):
    return Prediction(name, None, text, None, cut_off, {"sample": sample}, name)


def test_the_best_and_worst_answers_by_score_and_unused_ones():
    made = [answer("a", "1"), answer("a", "2"), answer("a", "3"), answer("a", "4"), answer("a", "5", cut_off=True)]
    made += [answer("b", "x"), answer("b", "y"), answer("c", " "), answer("c", "z")]
    found, unused = best_of(made, [2.0, 5.0, 1.0, 5.0, 9.0, 3.0, 3.0, 9.0, None])
    assert found == {"a": Sampled("2", 5.0, "3", 1.0), "b": Sampled("x", 3.0, "x", 3.0)}
    assert [one.differs for one in found.values()] == [True, False]
    assert unused == {"cut off": 1, "empty": 1, "without a score": 1}
    assert best_of(made[:2], None)[0]["a"] == Sampled("1", None, "1", None)


def teacher(request):
    """Longer answers for later samples, which the seed of a request identifies."""
    return Reply("close " * (1 + request["seed"] % 5))


def judge(frames, number):
    return {"reason": "length", "score": min(5, frames["prediction"].count("close"))}


def pairs_words(chat, judged, out="data"):
    sampling = ["engine.type=openai", f"engine.url={chat.url}", "engine.model=t", "engine.retries=0", "samples=3"]
    scored = ["--rubric", "efficiency", f"judge.url={judged.url}", "judge.model=j", "judge.retries=0"]
    return words(*sampling, "sampling.temperature=1", *scored, "--val", "2", "--test", "2", out=out)


def check_pairs(out="data"):
    pairs = rows(f"{out}/preferences/rationales_preference_train.parquet")
    assert pairs
    for pair in pairs:
        best, worst = (pair[side][-1]["content"].count("close") for side in ("chosen", "rejected"))
        assert (pair["chosen_score"], pair["rejected_score"]) == (best, worst)
        assert best > worst
        assert pair["chosen"][0] == pair["rejected"][0]
    taught = {row["document"]: row["messages"] for row in rows(f"{out}/sft/rationales_sft_train.parquet")}
    assert len(taught) == 6
    assert all(taught[pair["document"]] == pair["chosen"] for pair in pairs)


def test_after_failures_only_missing_answers_and_scores_are_requested(capsys):
    down = {"teacher": True, "judge": True}
    with serving(
        lambda request: Reply(status=500) if down["teacher"] and len(chat.asked) > 12 else teacher(request)
    ) as chat:
        rule = lambda frames, number: "no JSON" if number == 1 else judge(frames, number)  # noqa: E731
        with judging(rule) as judged:
            command = pairs_words(chat, judged)
            assert main(command) == 1
            assert "run the same command again to continue" in capsys.readouterr().err
            down["teacher"] = False
            first = len(chat.asked)
            assert main(command) == 0
            assert len(chat.asked) - first == 30 - 12
            asked = len(judged.requests)
            printed = capsys.readouterr().out
            assert "1 sampled answers not used: without a score" in printed
            check_pairs()
            # Everything is there: nothing is sampled. The one unreadable reply is requested again.
            assert main(command) == 0
            assert (len(chat.asked) - first, len(judged.requests) - asked) == (18, 1)
            # Another teacher has no place in these files.
            assert main([*command, "sampling.top_p=0.5"]) == 2
            assert "data/sampled has answers that were sampled with another sampling" in capsys.readouterr().err
            # Neither has another document.
            with open("rules/new.txt", "w", encoding="utf-8") as file:
                file.write("A new rule.")
            assert main(command) == 2
            assert "documents.jsonl has other documents or another template" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_command_continues_to_the_same_bytes(folder):
    gate = []

    def slow(request):
        if len(chat.asked) > 14 and not gate:
            time.sleep(60)
        return teacher(request)

    with serving(slow) as chat, judging(judge) as judged:
        command = pairs_words(chat, judged)
        process = subprocess.Popen([*COMMAND, *command], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 200
        log = folder / "data" / "sampled" / "answers" / "checkpoints" / "completions.jsonl"
        while time.monotonic() < until and not (log.exists() and log.read_text().count("\n") >= 8):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        answered = {(row["id"], row["sample"]) for row in map(json.loads, log.read_text().splitlines()[1:])}
        assert len(answered) >= 7
        before = -1
        while before != len(
            chat.asked
        ):  # on a busy machine the server reads requests of the killed process for seconds
            before = len(chat.asked)
            time.sleep(5)
        gate.append("open")
        assert main(command) == 0
        assert len(chat.asked) - before == 30 - len(answered)
        assert len(judged.requests) <= 30
        check_pairs()
        assert main(pairs_words(chat, judged, out="alone")) == 0
    files = sorted(
        file.relative_to("data")
        for file in (folder / "data").glob("*/*.parquet")
        for file in [file.relative_to(folder)]
    )
    assert len(files) == 9
    for file in files:
        assert (folder / "data" / file).read_bytes() == (folder / "alone" / file).read_bytes()


def test_answers_sampled_and_scored_by_local_models(tiny_model, folder, capsys):
    reward = RewardModel(str(tiny_model), seed=5)
    reward.set_statistics(0.2, 0.5)
    reward.export(folder / "rm")
    sampling = [f"model.path={tiny_model}", "samples=2", "sampling.temperature=1", "rollout.tokens_per_turn=4"]
    command = words(*sampling, "--reward", "rm", "--val", "1", "--test", "1")
    assert main(command) == 0
    answers = [json.loads(line) for line in (folder / "data/sampled/answers.jsonl").read_text().splitlines()]
    assert len(answers) == 20
    finished = {row["id"] for row in answers if row["stop_reason"] == "end_token"}
    assert "sampled answers not used: cut off" in capsys.readouterr().out or len(finished) == 10
    before = {file: file.read_bytes() for file in (folder / "data").rglob("*.parquet")}
    assert main(command) == 0
    assert {file: file.read_bytes() for file in (folder / "data").rglob("*.parquet")} == before


def test_a_model_that_cannot_score_is_refused_before_answers_are_sampled(tiny_model, folder, capsys):
    more = ["samples=2", "sampling.temperature=1", f"model.path={tiny_model}"]
    for reward, message in ((str(tiny_model), "is not a reward model"), ("./nowhere", "--reward: ./nowhere")):
        assert main(words(*more, "--reward", reward)) == 2
        assert message in capsys.readouterr().err
    assert not (folder / "data").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--reward", "rm"], "--reward and --rubric score sampled answers; add the model that samples them"),
        (["--reward", "rm", "--rubric", "efficiency", "samples=2"], "keep one"),
        (["judge.url=http://x"], "judge.url=http://x has no effect without --rubric"),
        (["samples=2", "sampling.temperature=1"], "no scorer selects one; add --reward or --rubric"),
        (["samples=1", "--rubric", "efficiency", "judge.url=http://x", "judge.model=m"], "a pair needs two answers"),
        (["samples=2", "--rubric", "efficiency", "judge.url=http://x"], "model"),
        (["samples=2", "data.test=x"], "data of the sampled answers is determined by the documents; remove it"),
        (["--val", "1.5"], "--val 1.5 is neither a whole number nor a share such as 0.1"),
        (["--val", "6", "--test", "6"], "--val 6 and --test 6 leave none of 10 documents for training"),
        (["--answers", "rules/floor"], "belongs to no document"),
    ],
)
def test_options_that_give_no_rows_are_refused(more, message, capsys):
    assert main(words(*more)) == 2
    assert message in capsys.readouterr().err


def test_unreadable_documents_are_refused(folder):
    template = folder / "template.txt"
    for content, reason in (
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"  \n", "is empty"),
        (b"Rule 1: close the gate {name}.", "same text"),
    ):
        (folder / "rules" / "bad.txt").write_bytes(content)
        with pytest.raises(InputError, match=reason):
            read_documents(folder / "rules", template)
    (folder / "rules" / "bad.txt").unlink()
    template.write_text("no field")
    with pytest.raises(InputError, match=r"has no \{document\}"):
        read_documents(folder / "rules", template)
    template.write_text("{document}")
    with pytest.raises(InputError, match="is not a folder"):
        read_documents(folder / "nowhere", template)
