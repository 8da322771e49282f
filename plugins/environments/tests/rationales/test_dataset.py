"""Corruptions and whole data sets: sound procedures score 1, and corrupted ones have their fault in the stated step."""

import json
from dataclasses import replace

import pytest
import typer
from plugins.environments.tests.rationales.made import BEST, USED
from typer.testing import CliRunner

from posttrain.errors import RunError
from posttrain.seeds import random_stream
from posttrain_environments.rationales import dataset
from posttrain_environments.rationales.cli import rationales
from posttrain_environments.rationales.corruption import KINDS, corrupt
from posttrain_environments.rationales.dataset import identity, samples, write_dataset
from posttrain_environments.rationales.domains import draw_policy
from posttrain_environments.rationales.policies import Policy
from posttrain_environments.rationales.procedures import LABELS, Procedure, Step, parse, write
from posttrain_environments.rationales.verifier import reward, verify

COUNTS = {"train": 60, "val": 8, "test": 8}


@pytest.fixture(scope="module")
def made():
    return list(samples(3, COUNTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("pyarrow")
    out = tmp_path_factory.mktemp("rationales")
    write_dataset(out, 3, COUNTS)
    return out


def read(path):
    return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()


def test_sound_procedures_score_exactly_one(made):
    assert len(made) == sum(COUNTS.values())
    for _, sample in made:
        verdict = verify(write(sample.procedure), sample.policy)
        assert (verdict.factual_accuracy, verdict.logical_soundness, verdict.efficiency, verdict.reward) == (1, 1, 1, 1)
        assert verdict.faults == ()


def without(procedure: Procedure, label: str) -> tuple[Step, ...]:
    """The steps without the step `label`; whatever led there leads on to where its NO led, labels moved back by one."""
    onward = next(step.no for step in procedure.steps if step.label == label)

    def back(target: str) -> str:
        target = onward if target == label else target
        return LABELS[LABELS.index(target) - 1] if target in LABELS and target > label else target

    return tuple(
        Step(back(step.label), step.question, back(step.yes), back(step.no))
        for step in procedure.steps
        if step.label != label
    )


def test_every_corruption_lowers_the_reward_and_is_in_its_step(made):
    seen = set()
    for _, sample in made:
        assert len({worse.kind for worse in sample.corruptions}) == 2
        for worse in sample.corruptions:
            seen.add(worse.kind)
            sound = sample.procedure
            assert verify(write(worse.procedure), sample.policy) == worse.verdict
            assert worse.verdict.reward < 1
            assert worse.procedure.rationale == sound.rationale
            if worse.kind in ("unreachable_step", "redundant_question"):
                assert without(worse.procedure, worse.step) == sound.steps
            else:
                changed = [new for new, old in zip(worse.procedure.steps, sound.steps, strict=True) if new != old]
                assert [step.label for step in changed] == [worse.step]
    assert seen == set(KINDS)


SHOWS = {
    "dangling_reference": ("dangling", "logical_soundness"),
    "unreachable_step": ("unreachable", "logical_soundness"),
    "loop": ("loop", "logical_soundness"),
    "redundant_question": ("redundant", "efficiency"),
    "flipped_branch": (None, "factual_accuracy"),
    "wrong_decision": ("wrong decision", "factual_accuracy"),
    "wrong_attribute": (None, "factual_accuracy"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_lowers_its_score_and_the_verifier_names_the_step(kind):
    fault, lowered = SHOWS[kind]
    for number in range(20):
        worse = corrupt(BEST, USED, kind, random_stream("test", number))
        assert worse is not None
        assert getattr(worse.verdict, lowered) < 1
        assert fault is None or (worse.step, fault) in {(found.step, found.kind) for found in worse.verdict.faults}
        assert worse.verdict.reward < 1


def test_a_corruption_that_keeps_the_reward_is_not_made():
    constant = Procedure((Step("A", "Is it used?", "DENY", "APPROVE"),), "so it is.")
    assert corrupt(constant, USED, "redundant_question", random_stream("test")) is None
    idle = Step("D", "Is it big?", "DENY", "APPROVE")
    with_idle = Procedure((*BEST.steps, idle), "so it is.")
    for number in range(30):
        worse = corrupt(with_idle, USED, "wrong_decision", random_stream("test", number))
        assert worse is not None
        assert worse.procedure.steps[3] == idle
    with pytest.raises(ValueError, match="unknown corruption 'typo'"):
        corrupt(BEST, USED, "typo", random_stream("test"))


def test_splits_share_no_policy(made, folder):
    names = {split: {identity(sample.policy) for s, sample in made if s == split} for split in COUNTS}
    assert {split: len(found) for split, found in names.items()} == COUNTS
    assert len(set.union(*names.values())) == sum(COUNTS.values())
    for split, found in names.items():
        for file in ("sft/rationales_sft", "preferences/rationales_preference", "prompts/rationales_prompts"):
            assert {row["policy"] for row in read(folder / f"{file}_{split}.parquet")} == found


def test_a_repeated_policy_is_skipped(monkeypatch):
    few = [draw_policy(random_stream("few", number)) for number in range(30)]
    monkeypatch.setattr(dataset, "draw_policy", lambda random: few[random.integers(len(few))])
    for seed in range(4):
        names = [identity(sample.policy) for _, sample in samples(seed, {"train": 8, "val": 2, "test": 2})]
        assert len(names) == len(set(names)) == 12


def test_identity_is_of_meaning_not_of_wording():
    moved = replace(
        USED,
        attributes=(USED.attributes[2], USED.attributes[0], USED.attributes[1]),
        rules=tuple(
            replace(rule, conditions=tuple(((place + 1) % 3, wanted) for place, wanted in rule.conditions[::-1]))
            for rule in USED.rules
        ),
    )
    assert identity(moved) == identity(USED)
    assert identity(replace(USED, default="ESCALATE")) != identity(USED)
    assert identity(replace(USED, domain="visas")) != identity(USED)


def test_files_have_the_columns_that_stages_read(folder):
    for split, count in COUNTS.items():
        sft = read(folder / f"sft/rationales_sft_{split}.parquet")
        pairs = read(folder / f"preferences/rationales_preference_{split}.parquet")
        prompts = read(folder / f"prompts/rationales_prompts_{split}.parquet")
        assert (len(sft), len(pairs), len(prompts)) == (count, 2 * count, count)
        for row, prompt in zip(sft, prompts, strict=True):
            user, answer = row["messages"]
            assert (user["role"], answer["role"]) == ("user", "assistant")
            assert prompt["context_messages"] == [user]
            assert prompt["completion"] == answer["content"]
            assert reward(answer["content"], prompt["label"]) == 1
            policy = Policy.from_json(row["label"])
            assert all(f"- {question.ask}\n" in user["content"] for question in policy.questions)
            assert len(user["content"]) < 1600
        for row in pairs:
            assert row["chosen"][0] == row["rejected"][0]
            assert reward(row["chosen"][1]["content"], row["label"]) == 1
            assert reward(row["rejected"][1]["content"], row["label"]) == row["rejected_reward"] < 1
            assert row["corruption"] in KINDS
            labels = [step.label for step in parse(row["rejected"][1]["content"]).steps]
            assert row["corrupted_step"] in labels


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path):
    write_dataset(tmp_path / "again", 3, COUNTS)
    write_dataset(tmp_path / "more", 3, {**COUNTS, "train": 20})
    write_dataset(tmp_path / "other", 4, {**COUNTS, "train": 1})
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.parquet"))
    assert len(files) == 9
    for file in files:
        bytes_ = (folder / file).read_bytes()
        assert (tmp_path / "again" / file).read_bytes() == bytes_
        assert (tmp_path / "other" / file).read_bytes() != bytes_
        # The number of training rows leaves the others alone.
        assert ((tmp_path / "more" / file).read_bytes() == bytes_) == ("train" not in file.name)


def test_the_command_prints_files_and_verdicts(tmp_path):
    pytest.importorskip("pyarrow")
    app = typer.Typer()
    app.command()(rationales)
    result = CliRunner().invoke(
        app, ["--out", str(tmp_path), "--train", "20", "--val", "3", "--test", "3"], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'preferences/rationales_preference_train.parquet'}: 40 rows" in result.output
    sound = next(line for line in result.output.splitlines() if "sound " in line)
    assert sound.split("│")[2:7] == [" 26 ", *[f" {1:<{n}.3f} " for n in (8, 9, 10, 6)]]
    assert json.loads(read(tmp_path / "prompts/rationales_prompts_val.parquet")[0]["label"])["rules"]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write .*file"):
        write_dataset(tmp_path / "file", 0, {"train": 10**9, "val": 1, "test": 1})
