"""`posttrain evaluate judge` end to end: output, cache, retries, and errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.evaluation.judges import load_rubric
from posttrain.evaluation.results import read_results
from tests.evaluation.made import write
from tests.rollout.chat_server import Reply

from .judge_server import serving

COMMAND = "import sys; from posttrain.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def file(tmp_path):
    """Twelve predictions for six prompts that contain their number of points."""
    common = {"reference": "r"}
    made = [
        {"id": n // 2, "prompt": f"p {n // 2}", "prediction": str(1 + n % 5), "sample": n % 2, **common}
        for n in range(12)
    ]
    return write(tmp_path / "made.jsonl", made)


def points(frames, number):
    return {"reason": "read", "score": int(frames["prediction"])}


def words(file, server, *more, rubric="efficiency"):
    named = ["--rubric", rubric, f"judge.url={getattr(server, 'url', server)}", "judge.model=m", "judge.retries=0"]
    return ["evaluate", "judge", str(file), *named, *more]


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_scores_and_a_second_run_sends_no_requests(file, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-of-mine")
    with serving(points) as server:
        command = words(
            file, server, "judge.api_key_variable=JUDGE_KEY", "judge.structured=true", "judge.max_tokens=99"
        )
        assert main(command) == 0
        assert len(server.requests) == 12
        first = capsys.readouterr()
        kept = {path.name: path.read_text() for path in file.parent.iterdir()}
        assert main(command) == 0
        assert len(server.requests) == 12
        # Another rubric or judge makes new requests.
        assert main(words(file, server, rubric="logical_soundness")) == 0
        assert len(server.requests) == 24
        # So does another effort of a reasoning model.
        reasoning = [*command, "judge.sampling.temperature=null", "judge.sampling.reasoning_effort=high"]
        assert main([*reasoning, "judge.token_limit_field=max_completion_tokens"]) == 0
        assert len(server.requests) == 36
        asked = server.requests[-1]
        assert {"temperature", "max_tokens"}.isdisjoint(asked)
        assert (asked["reasoning_effort"], asked["max_completion_tokens"]) == ("high", 99)
    assert "efficiency" in first.out
    assert "judge m" in first.out
    assert {request["key"] for request in server.requests[:12]} == {"Bearer secret-of-mine"}
    assert (server.requests[0]["max_tokens"], "response_format" in server.requests[0]) == (99, True)
    assert sorted(kept) == ["judge-cache.jsonl", "made.efficiency.json", "made.efficiency.jsonl", "made.jsonl"]
    assert "secret-of-mine" not in "".join(kept.values())
    assert {name: (file.parent / name).read_text() for name in kept if "cache" not in name} == {
        name: text for name, text in kept.items() if "cache" not in name
    }
    found = records(file.with_name("made.efficiency.jsonl"))
    assert [record["score"] for record in found] == [1 + number % 5 for number in range(12)]
    assert all(record["judge"] == "m" and len(record["prompt_hash"]) == 16 for record in found)
    numbers = json.loads(kept["made.efficiency.json"])["metrics"]["efficiency"]
    assert numbers["value"] == pytest.approx(sum(1 + number % 5 for number in range(12)) / 12)
    assert numbers["low"] < numbers["value"] < numbers["high"]
    assert (numbers["n"], numbers["texts"], numbers["about"]["judge"]) == (6, 12, "m")
    assert read_results(file.with_name("made.efficiency.json"))


def test_after_a_kill_only_missing_replies_are_requested(file):
    gate = []

    def slow(frames, number):
        if number > 5 and not gate:
            time.sleep(60)
        return points(frames, number)

    with serving(slow) as server:
        command = words(file, server, "--workers", "2")
        process = subprocess.Popen([sys.executable, "-c", COMMAND, *command], stderr=subprocess.DEVNULL)
        cache = file.with_name("judge-cache.jsonl")
        until = time.monotonic() + 120
        while len(server.requests) < 7 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL
        assert len(records(cache)) == 5
        assert not file.with_name("made.efficiency.jsonl").exists()
        asked = [json.dumps(request["messages"]) for request in server.requests[:5]]
        gate.append("open")
        assert main(command) == 0
        again = [json.dumps(request["messages"]) for request in server.requests[7:]]
        assert len(again) == 12 - 5
        assert not set(again) & set(asked)
    assert all(record["score"] for record in records(file.with_name("made.efficiency.jsonl")))


def test_only_failed_and_unreadable_requests_are_repeated(file, capsys):
    sick = ["yes"]

    def rule(frames, number):
        return Reply(status=500) if sick and frames["prediction"] == "3" else points(frames, number)

    with serving(rule) as server:
        assert main(words(file, server)) == 1
        said = capsys.readouterr()
        assert "the judge did not answer for 2 of 12 rows" in said.err
        assert "made.jsonl row 3: judge m" in said.out
        partial = records(file.with_name("made.efficiency.jsonl"))
        assert sum(record["score"] is None for record in partial) == 2
        assert file.with_name("made.efficiency.json").exists()
        sick.clear()
        before = len(server.requests)
        assert main(words(file, server)) == 0
        assert len(server.requests) == before + 2
    file.with_name("judge-cache.jsonl").unlink()
    with serving(lambda frames, number: "It is very good, 5 of 5!") as server:
        assert main(words(file, server)) == 1
        said = capsys.readouterr()
        # Unreadable replies are not cached, because a retry may succeed.
        server.rule = points
        assert main(words(file, server)) == 0
    assert "no row has a score" in said.err
    assert "unreadable reply: 9 more" in said.out


def test_pairs(file, tmp_path, capsys):
    other = tmp_path / "before.jsonl"
    other.write_text(file.read_text().replace('"prediction": "5"', '"prediction": "0"'))

    def larger(frames, number):
        return {"reason": "r", "better": "first" if frames["first"] > frames["second"] else "second"}

    with serving(larger) as server:
        assert main(words(file, server, "--against", str(other), "--out", str(tmp_path / "new" / "won.jsonl"))) == 0
    assert len(server.requests) == 4
    numbers = json.loads((tmp_path / "new" / "won.json").read_text())["metrics"]
    assert numbers["win_rate"]["value"] == pytest.approx((2 + 10 * 0.5) / 12)
    assert (numbers["win_rate"]["about"]["wins"], numbers["win_rate"]["about"]["same text"]) == (2, 10)
    assert numbers["position_bias"]["value"] == 0
    assert "win_rate" in capsys.readouterr().out


RUBRIC = """
name: politeness
measures: Whether it is polite.
scale:
  type: points
  anchors:
    - {points: 3, means: Kind.}
    - {points: 0, means: Rude.}
template: |
  Said: {prediction} (as JSON {"a": 1}), to {prompt}
"""


def test_a_custom_rubric(file, tmp_path, capsys):
    path = tmp_path / "polite.yaml"
    path.write_text(RUBRIC)
    assert main(words(file, "http://h/v1", "--dry-run", rubric=str(path))) == 0
    said = capsys.readouterr().out
    assert "from 0 (worst) to 3 (best)" in said
    assert "0: Rude.\n3: Kind." in said
    assert '(as JSON {"a": 1}), to \n' in said
    assert "12 requests" in said
    with serving(lambda frames, number: {"score": 2}) as server:
        assert main(words(file, server, rubric=str(path))) == 0
    assert file.with_name("made.politeness.jsonl").exists()


def test_the_rubric_of_the_guide_is_valid(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "judges.md").read_text()
    path = tmp_path / "politeness.yaml"
    path.write_text(guide.split("```yaml\n")[1].split("```")[0])
    assert load_rubric(str(path)).name == "politeness"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: politeness\n", ""), "name is missing"),
        (("name: politeness", "name: politeness\nmesures: x"), "line 3: there is no key mesures"),
        (("{prediction}", "{answer}"), "line 9: template: there is no field {answer}"),
        (("{prediction}", "it"), "template must contain {prediction} exactly once"),
        (("type: points", "type: stars"), 'scale.type is "stars"; it must be points or claims'),
        (("points: 3", "points: 0"), "two anchors have the same points"),
        (("points: 3", "points: high"), 'line 7: points is "high"; it must be a whole number'),
        (("means: Kind.", "means: Kind, and short."), "line 7: there is no key and short."),
        (("{points: 3, means: Kind.}", "Kind."), "line 6: scale.anchors is"),
        (("measures: Whether", "measures: [Whether"), "line 4"),
    ],
)
def test_error_of_a_wrong_rubric_names_the_line(file, tmp_path, capsys, change, message):
    path = tmp_path / "polite.yaml"
    path.write_text(RUBRIC.replace(*change))
    assert main(words(file, "http://h/v1", rubric=str(path))) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "polite.yaml" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rubric", "eficiency"], "did you mean efficiency?"),
        (["judge.url=localhost:8000"], "localhost:8000"),
        (["judge.model="], "model"),
        (["judge.api_key_variable=NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--out", "x.json"], "must end in .jsonl"),
        (["--out", "made.jsonl"], "would be overwritten"),
        (["judge.cache=made.jsonl"], "would be overwritten"),
        (["judge.cache=made.efficiency.jsonl"], "the file of the results"),
        (["judge.requests_per_minute=0"], "requests_per_minute"),
        (["--against", "nowhere.jsonl"], "nowhere.jsonl"),
        (["columns.prediction=text"], "needs `text`"),
    ],
)
def test_refusals_before_the_first_request(file, capsys, monkeypatch, more, message):
    monkeypatch.chdir(file.parent)
    before = file.read_text()
    with serving(points) as server:
        assert main(words("made.jsonl", server, *more)) == 2
        assert not server.requests
    assert message in capsys.readouterr().err
    assert file.read_text() == before
