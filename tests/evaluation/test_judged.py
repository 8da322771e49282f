"""Judging a file by an honest judge, by judges that fail, and pairs by judges with a bias."""

import time

import numpy as np
import pytest

from posttrain.data.problems import Problems
from posttrain.engines import openai as remote
from posttrain.engines.openai import RequestRate
from posttrain.errors import InputError
from posttrain.evaluation.judges import (
    NO_REPLY,
    NOT_ASKED,
    UNREADABLE,
    Options,
    judge_pairs,
    judge_predictions,
    load_rubric,
)
from posttrain.evaluation.predictions import Prediction, Predictions
from posttrain.recipe.judge import JudgeServerRecipe
from posttrain.runs.intervals import mean
from tests.rollout.chat_server import Reply

from .judge_server import serving


def rows(texts, samples=1, reference="r", path="p.jsonl"):
    """`samples` predictions to a prompt; items a0, a1, ..."""
    made = []
    for number, text in enumerate(texts):
        item = f"a{number // samples}"
        messages = [{"role": "user", "content": f"prompt {item}"}]
        extra = {"sample": number % samples}
        made.append(Prediction(item, messages, text, reference, False, extra, f"{path} row {number + 1}"))
    return Predictions(path, made, Problems())


def options(server, rubric="efficiency", workers=4, longest=1_000, **keys):
    keys = {"retries": 0, "timeout": 60, **keys}
    return Options(load_rubric(rubric), JudgeServerRecipe(url=server.url, model="m", **keys), workers, longest)


def judged(rule, texts, other=None, **keys):
    """The result of judging rows, or of comparing them with `other` ones, and the server."""
    made = texts if isinstance(texts, Predictions) else rows(texts)
    with serving(rule) as server:
        if other is None:
            return judge_predictions(made, options(server, **keys)), server
        return judge_pairs(made, other, options(server, **keys)), server


def points(frames, number):
    """The points that the prediction contains."""
    return {"reason": f"it says {frames['prediction']}", "score": int(frames["prediction"])}


def test_the_mean_over_prompts_with_its_interval():
    texts = ["1", "5", "3", "3", "5", "5", "2", "4"]
    found, server = judged(points, rows(texts, samples=2))
    (measured,) = found.results.metrics
    value = found.results.estimates()["efficiency"]
    assert (value.n, measured.texts, measured.left_out) == (4, 8, {})
    assert value.value == pytest.approx(3.5)
    # Of items, not of rows, on the scale of the rubric.
    assert value.limits == mean([3.0, 3.0, 5.0, 3.0], (1, 5)).limits
    assert [record["score"] for record in found.records] == [float(text) for text in texts]
    third = found.records[2]
    assert (third["reason"], third["id"], third["sample"], third["row"]) == ("it says 3", "a1", 0, "p.jsonl row 3")
    assert {record["judge"] for record in found.records} == {"m"}
    # Two prompts have the same answer twice.
    assert len({record["prompt_hash"] for record in found.records}) == 6
    assert len({record["rubric_hash"] for record in found.records}) == 1
    assert "m" in found.results.details()[0]
    assert all(request["temperature"] == 0 for request in server.requests)


def test_claims_are_a_share():
    def supported(frames, number):
        listed = frames["prediction"].split(".")[:-1]
        claims = [{"claim": one, "supported": one.strip() in frames["reference"]} for one in listed]
        return {"reason": "r", "claims": claims}

    made = rows(["x. y. z.", "x.", "Well!"], reference="x and y")
    found, server = judged(supported, made, rubric="factual_accuracy", structured=True)
    assert [record["score"] for record in found.records] == [pytest.approx(2 / 3), 1.0, None]
    assert found.records[2]["left_out"] == UNREADABLE
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["reason", "claims"]


def test_rows_without_the_fields_of_the_rubric_are_skipped_and_counted():
    made = rows(["1", "2"], reference=None)
    assert judged(points, made)[0].results.metrics[0].texts == 2
    found, server = judged(points, made, rubric="factual_accuracy")
    assert [record["left_out"] for record in found.records] == ["no reference"] * 2
    assert (found.results.metrics, found.unanswered, server.requests) == ([], 0, [])


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (Reply(status=500), NO_REPLY),
        (Reply(status=401), NO_REPLY),
        (Reply(body="{not json"), NO_REPLY),
        (Reply(body="[]"), NO_REPLY),
        (Reply('{"score": 3}', cut=True), NO_REPLY),
        (Reply('{"score": 3}', delay=5), NO_REPLY),
        (Reply('{"reason": "half an', "length"), UNREADABLE),
        (Reply('{"score": 3}', "length"), UNREADABLE),
        ("I give 5 points.", UNREADABLE),
        ('{"score": 0}', UNREADABLE),
        ('{"score": 6}', UNREADABLE),
    ],
)
def test_invalid_verdicts_are_counted_by_reason_and_never_scored(trouble, kind):
    def rule(frames, number):
        return points(frames, number) if frames["prediction"] != "3" else trouble

    # Short only for the server that hangs, because this process may be suspended for a while.
    seconds = 1 if isinstance(trouble, Reply) and trouble.delay else 60
    found, _ = judged(rule, ["5", "3", "4"], timeout=seconds, workers=1)
    assert [record["score"] for record in found.records] == [5, None, 4]
    assert found.records[1]["left_out"] == kind
    assert "judge m at http://127.0.0.1" in found.records[1]["failure"]
    assert found.results.estimates()["efficiency"].value == 4.5
    assert found.results.metrics[0].left_out == {kind: 1}
    assert found.unanswered == (kind == NO_REPLY)
    assert any(line.startswith(f"{kind}: p.jsonl row 2: judge m") for line in found.warnings)


def test_replies_of_a_judge_are_escaped_for_the_terminal():
    found, _ = judged(lambda frames, number: "\x1b[2J\nscore: 5\r5", ["3"])
    (line,) = found.warnings
    assert line.isprintable()
    assert "\x1b" in found.records[0]["failure"]


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status):
    trouble = Reply(status=status, headers={"Retry-After": "1"})
    found, server = judged(lambda frames, number: trouble if number == 1 else points(frames, number), ["4"], retries=2)
    assert found.records[0]["score"] == 4
    assert len(server.requests) == 2
    # Half a second is what the client would wait by itself.
    assert server.times[1] - server.times[0] >= 0.99


def test_temporary_errors_are_retried_and_give_the_same_numbers():
    texts = [str(1 + number % 5) for number in range(20)]
    kinds = [Reply(status=500), Reply(status=429, headers={"Retry-After-Ms": "10"}), Reply("x", cut=True)]
    first = set()

    def rule(frames, number):
        if frames["user"] in first:
            return points(frames, number)
        first.add(frames["user"])
        return kinds[len(first) % 3]

    found, server = judged(rule, texts, retries=3, workers=8)
    assert [record["score"] for record in found.records] == [float(text) for text in texts]
    assert len(server.requests) == 40


@pytest.mark.parametrize("good", [0, 10])
def test_a_server_that_fails_for_good_does_not_get_every_row_and_earlier_scores_are_kept(good):
    texts = [str(1 + number % 5) for number in range(200)]
    found, server = judged(
        lambda frames, number: points(frames, number) if number <= good else Reply(status=500), texts, workers=2
    )
    scored = [record["score"] for record in found.records if record["score"] is not None]
    assert len(scored) == sum(metric.texts for metric in found.results.metrics) == good
    assert found.unanswered == 200 - good
    kinds = [record["left_out"] for record in found.records]
    assert kinds.count(NO_REPLY) >= 3
    assert kinds.count(NOT_ASKED) > 150
    assert len(server.requests) < 30


def test_a_server_that_hangs_ends_in_time():
    begun = time.monotonic()
    with serving(lambda frames, number: Reply(delay=2)) as server:
        found = judge_predictions(rows(["3"] * 50), options(server, workers=2, timeout=0.1))
        assert time.monotonic() - begun < 20
    assert found.unanswered == 50


def test_requests_per_minute_counts_every_request(monkeypatch):
    rate, begun = RequestRate(6_000), time.monotonic()
    for _ in range(11):
        rate.wait()
    assert time.monotonic() - begun >= 0.099
    waited = []

    class Rate:
        def __init__(self, per_minute):
            assert per_minute == 77

        def wait(self, request):
            waited.append(request)

    monkeypatch.setattr(remote, "RequestRate", Rate)
    trouble = Reply(status=500, headers={"Retry-After-Ms": "1"})

    def rule(frames, number):
        return trouble if number == 1 else points(frames, number)

    _, server = judged(rule, ["1", "2", "3", "4"], retries=1, requests_per_minute=77)
    assert len(waited) == len(server.requests) == 5


def better(preferred):
    """A rule for pairs out of a function of both texts that gives first, second or tie."""
    return lambda frames, number: {"reason": "r", "better": preferred(frames["first"], frames["second"])}


@better
def larger(first, second):
    return "tie" if first == second else "first" if int(first) > int(second) else "second"


def test_a_win_is_a_win_in_both_orders():
    found, server = judged(larger, ["5", "1", "3", "2"], rows(["4", "2", "3", "1"]))
    assert [record["value"] for record in found.records] == [1, 0, 0.5, 1]
    # Equal texts are a tie without asking.
    assert len(server.requests) == 6
    value, bias, agree = found.results.estimates().values()
    assert value.value == pytest.approx(2.5 / 4)
    assert (bias.value, agree.value) == (0, 1)
    about = found.results.metrics[0].about
    assert (about["wins"], about["ties"], about["losses"], about["same text"]) == (2, 1, 1, 1)


@pytest.mark.parametrize(("answer", "bias"), [("first", 1), ("second", -1), ("tie", 0)])
def test_a_judge_that_follows_position_only_gives_no_winner(answer, bias):
    texts = [str(number) for number in range(12)]
    found, _ = judged(better(lambda *_: answer), texts, rows(texts[::-1]))
    assert {record["value"] for record in found.records} == {0.5}
    estimates = found.results.estimates()
    assert (estimates["win_rate"].value, estimates["position_bias"].value) == (0.5, bias)
    assert estimates["orders_agree"].value == (answer == "tie")
    assert found.results.metrics[0].about["ties"] == 12
    # Twelve ties show no spread, and are not mean certainty.
    assert estimates["win_rate"].low < 0.4


def test_a_pair_with_one_readable_reply_has_no_value():
    found, _ = judged(
        lambda frames, number: "?" if frames["first"] == "1" else larger(frames, number), ["5", "1"], rows(["4", "2"])
    )
    assert [record["value"] for record in found.records] == [1, None]
    assert found.records[1]["left_out"] == UNREADABLE
    assert found.results.metrics[0].left_out == {UNREADABLE: 1}


def test_samples_are_paired_by_their_number_and_others_are_reported():
    one, other = rows(["5", "1"], samples=2), rows(["2", "4"], samples=2)
    other.rows.reverse()
    found, _ = judged(larger, one, other)
    assert [record["value"] for record in found.records] == [1, 0]
    assert found.results.estimates()["win_rate"].n == 1
    found, _ = judged(larger, ["5", "1", "3"], rows(["4", "2"], path="q.jsonl"))
    assert found.results.metrics[0].left_out == {"only in p.jsonl": 1}
    assert any("1 left out: only in p.jsonl" in line for line in found.results.details())
    strangers = rows(["1"])
    strangers.rows[0].prompt[0]["content"] = "another"
    with pytest.raises(InputError, match=r"p\.jsonl and q\.jsonl have no prediction for the same prompt"):
        judged(larger, strangers, rows(["1"], path="q.jsonl"))


def test_one_prompt_and_equal_scores_have_a_wide_interval():
    """The scale is known, so 4 of 5 points for every prompt does not mean certainty."""
    one, three = (judged(points, ["4"] * n)[0].results.estimates()["efficiency"] for n in (1, 3))
    assert (one.value, one.n, three.n) == (4, 1, 3)
    assert 1 <= one.low < three.low < 3 < 4 < three.high < one.high <= 5


def test_order_of_completion_changes_nothing():
    slow = np.random.default_rng(0).random(30) * 0.02

    def rule(frames, number):
        time.sleep(slow[number % 30])
        return points(frames, number)

    one, other = (judged(rule, [str(1 + n % 5) for n in range(30)], workers=workers)[0] for workers in (1, 16))
    assert one.records == other.records
    assert one.results.estimates() == other.results.estimates()
