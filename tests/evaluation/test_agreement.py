"""Agreement of a judge with the truth: scripted judges err at known rates, and these rates are measured."""

import hashlib
import json
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from posttrain_environments.rationales.dataset import samples
from posttrain_environments.rationales.procedures import write as write_procedure
from posttrain_environments.rationales.verifier import scores

from posttrain.cli.main import main
from posttrain.evaluation.agreement import pair_agreement, score_agreement
from posttrain.evaluation.judges import load_rubric
from posttrain.evaluation.predictions import Prediction
from posttrain.evaluation.results import read_results
from posttrain.evaluation.statistics import combine, estimate, item_sums
from tests.evaluation.judge_server import serving
from tests.evaluation.made import write

VERIFIER = "posttrain_environments.rationales.verifier:scores"


def row(item, text, **values):
    return Prediction(str(item), None, text, None, False, values, f"row {item}")


def value_of(results, name):
    return estimate(next(one for one in results if one.name == name).scores)


def deciders(position, length, own, wrong):
    """The cause of each of 20 verdicts: the given numbers by position and so on, the others by the truth."""
    rest = 20 - position - length - own - wrong
    return ["position"] * position + ["length"] * length + ["own"] * own + ["wrong"] * wrong + ["truth"] * rest


def preference(decider, order, longer, own, better):
    """The preference for the text shown first: 1, 1/2 or 0. The other arguments are 1 or -1 (or 0) for the pair's first text."""
    signs = {"position": 1, "length": order * longer, "own": order * own, "wrong": -order * better}
    return (1 + signs.get(decider, order * better)) / 2


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (2, 0, 0, 3), (2, 3, 4, 2), (1, 5, 0, 4)])
def test_shares_of_the_verdicts_are_estimated_exactly(counts):
    """Every combination of a longer, a better and an own text has each verdict as often as its share says."""
    pairs, records = [], []
    kinds = [(1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (1, 1), (1, 1)]  # longer texts are better more often
    for longer, better in kinds:
        for decider, other in product(deciders(*counts), repeat=2):
            texts = ("a" * (5 + longer), "a" * 5)
            pairs.append((row(len(pairs), texts[0], truth=better), row(len(pairs), texts[1], truth=0.0)))
            shown = [preference(one, order, longer, 1, better) for one, order in ((decider, 1), (other, -1))]
            records.append({"first_shown": shown})
    found = pair_agreement(pairs, records, lambda one: one.row["truth"], 0)
    position, length, own, wrong = (count / 20 for count in counts)
    assert value_of(found, "length_bias").value == pytest.approx(length)
    assert value_of(found, "self_preference").value == pytest.approx(own)
    told = [(longer, better) for longer, better in kinds if better]
    errors = [wrong + position / 2 + length * (longer != better) + own * (better < 0) for longer, better in told]
    assert value_of(found, "error_rate").value == pytest.approx(np.mean(errors))
    assert next(one for one in found if one.name == "error_rate").about["pairs of equal truth"] == 400


def test_without_a_truth_quality_counts_as_bias():
    pairs = [(row(i, "long" if i % 2 else "l", truth=1), row(i, "ll", truth=0)) for i in range(20)]
    records = [{"first_shown": [float(i % 2), 1.0 - i % 2]} for i in range(20)]  # the longer one, as if it were better
    (alone,) = pair_agreement(pairs, records, None, None)
    assert (alone.name, estimate(alone.scores).value) == ("length_bias", pytest.approx(1))
    assert "includes differences in quality" in alone.about["measures"]


def test_points_and_claims_have_the_rates_of_their_definitions():
    points, claims = load_rubric("efficiency"), load_rubric("factual_accuracy")
    truths = [1, 2, 3, 4, 5] * 8
    given = [(true % 5) + 1 if i % 4 == 0 else true for i, true in enumerate(truths)]
    rows = [row(i, "x" * (1 + i % 3), truth=true) for i, true in enumerate(truths)]
    records = [{"score": score} for score in given]
    found = score_agreement(rows, records, lambda one: one.row["truth"], points)
    assert value_of(found, "error_rate").value == 10 / 40
    assert value_of(found, "mean_error").value == pytest.approx(np.mean(np.array(given) - truths) / 4)
    ranks = np.corrcoef(given, truths)[0, 1]  # each value is as frequent in both, so ranks are linear in values
    assert value_of(found, "rank_correlation").value == pytest.approx(ranks)
    shares = [0.0, 0.25, 0.5, 1.0] * 5
    rows = [row(i, "x" * (i + 1), truth=share) for i, share in enumerate(shares)]
    records = [{"score": share + 0.1 * (1 - 2 * share)} for share in shares]
    assert value_of(
        score_agreement(rows, records, lambda one: one.row["truth"], claims), "error_rate"
    ).value == pytest.approx(0.1)


def test_least_squares_and_correlation_are_those_of_numpy():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 3)), random.normal(size=30)
    normal = (x[:, :, None] * x[:, None]).reshape(30, -1)
    fit = item_sums("least_squares", ((str(i), [*normal[i], *(x[i] * y[i])]) for i in range(30)))
    assert combine("least_squares", fit.table().sum(0)) == pytest.approx(np.linalg.lstsq(x, y, rcond=None)[0][0])
    known = estimate(fit)
    residual = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    error = np.sqrt(residual @ residual / 27 * np.linalg.inv(x.T @ x)[0, 0])
    assert (known.high - known.low) / 2 == pytest.approx(2.05 * error, rel=0.3)
    a, b = x[:, 0], x[:, 1] + x[:, 0]
    sums = item_sums(
        "correlation", ((str(i), [1, u, v, u * u, v * v, u * v]) for i, (u, v) in enumerate(zip(a, b, strict=True)))
    )
    assert estimate(sums).value == pytest.approx(np.corrcoef(a, b)[0, 1])
    flat = item_sums("correlation", ((str(i), [1, 2, i, 4, i * i, 2 * i]) for i in range(5)))
    assert combine("correlation", flat.table().sum(0)) == 0


PAIRS = 80


def procedures(tmp_path, count):
    """Two files of procedures with their policies, and the verifier's scores of each text."""
    rows, truths = {"one": [], "other": []}, {}
    for number, (_, sample) in enumerate(samples(3, {"train": count, "val": 0, "test": 0})):
        texts = [write_procedure(sample.procedure), *(write_procedure(one.procedure) for one in sample.corruptions)]
        label = sample.policy.to_json()
        truths |= {text: scores(text, label) for text in texts}
        # Each file has the better text of some pairs, and the shorter of some.
        first, second = ((0, 1), (1, 0), (2, 1), (2, 0))[number % 4]
        for name, place in (("one", first), ("other", second)):
            text = texts[place] + ("\n" if (number + place) % 3 else "")
            truths[text] = truths[texts[place]]
            rows[name].append({"id": number, "prompt": sample.prompt, "prediction": text, "label": label})
    return [str(write(tmp_path / f"{name}.jsonl", of_file)) for name, of_file in rows.items()], truths


def uniform(*texts):
    """A number in [0, 1) that is the same for the same texts."""
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=6).digest()) / 2**48


def measured(file):
    results, _ = read_results(file)
    return {name: estimate(one.scores) for name, one in results.items()}


def command(files, server, rubric, *more):
    judge = ["--rubric", rubric, f"judge.url={server.url}", "judge.model=m", "--truth", VERIFIER, "judge.retries=0"]
    return ["evaluate", "judge", files[0], *judge, *more]


RATES = {"position": 0.12, "length": 0.15, "own": 0.18, "wrong": 0.08}


def test_errors_of_a_scripted_judge_of_pairs_are_estimated(tmp_path, capsys):
    files, truths = procedures(tmp_path, PAIRS)
    own = {json.loads(line)["prediction"].strip() for line in Path(files[1]).read_text().splitlines()}

    def rule(frames, number):
        first, second = frames["first"], frames["second"]
        better = np.sign(truths[first]["logical_soundness"] - truths[second]["logical_soundness"])
        decider, chance = "truth", uniform(first, second)
        for name, rate in RATES.items():
            if 0 <= chance < rate:
                decider = name
            chance -= rate
        longer, is_own = np.sign(len(first) - len(second)), 1 if first.strip() in own else -1
        shown = preference(decider, 1, longer, is_own, better)
        return {"reason": decider, "better": {1: "first", 0: "second"}.get(shown, "tie")}

    with serving(rule) as server:
        assert main(command(files, server, "logical_soundness", "--against", files[1], "--own", files[1])) == 0
    printed = capsys.readouterr().out
    found = measured(tmp_path / "one.logical_soundness.against.other.json")
    for name, rate in (("position_bias", "position"), ("length_bias", "length"), ("self_preference", "own")):
        assert found[name].low <= RATES[rate] <= found[name].high, name
        assert found[name].high - found[name].low < 0.4
        assert name in printed
    assert found["error_rate"].value > RATES["wrong"]


@pytest.mark.parametrize(("rubric", "rate"), [("logical_soundness", 0.2), ("factual_accuracy", 0.15)])
def test_errors_of_a_scripted_judge_of_scores_are_estimated(rubric, rate, tmp_path):
    files, truths = procedures(tmp_path, PAIRS)
    rows = [json.loads(line) for line in Path(files[0]).read_text().splitlines()]
    write(tmp_path / "one.jsonl", [{**one, "reference": "A. Reference"} for one in rows])

    def rule(frames, number):
        text, true = frames["prediction"], truths[frames["prediction"]][rubric]
        if rubric == "factual_accuracy":
            # Ten claims or more, of which as many hold as the truth says; each is decided wrongly at the rate.
            share = Fraction(true).limit_denominator(96)
            count = share.denominator * -(-10 // share.denominator)
            holds = [claim < share * count for claim in range(count)]
            decided = [own != (uniform(text, str(claim)) < rate) for claim, own in enumerate(holds)]
            return {"reason": "r", "claims": [{"claim": "c", "supported": bool(one)} for one in decided]}
        points = int(np.floor(1 + 4 * true + 0.5))
        return {"reason": "r", "score": points % 5 + 1 if uniform(text) < rate else points}

    with serving(rule) as server:
        assert main(command(files, server, rubric)) == 0
    found = measured(tmp_path / f"one.{rubric}.json")
    assert found["error_rate"].low <= rate <= found["error_rate"].high
    assert found["error_rate"].high - found["error_rate"].low < 0.25
    assert found["rank_correlation"].value > 0.15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--truth", "points"], "--truth: no judged row has a truth"),
        (["--truth", "nowhere:f"], "--truth"),
        (["--own", "x.jsonl"], "--own x.jsonl is not one of two compared files"),
    ],
)
def test_a_missing_truth_is_refused(words, message, tmp_path, capsys):
    file = write(tmp_path / "one.jsonl", [{"id": 0, "prompt": "p", "prediction": "x"}])
    with serving(lambda frames, number: {"reason": "r", "score": 3}) as server:
        judge = ["--rubric", "efficiency", f"judge.url={server.url}", "judge.model=m"]
        assert main(["evaluate", "judge", str(file), *judge, *words]) == 2
    assert message in capsys.readouterr().err
