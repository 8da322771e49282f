"""Law 10 for the stages that learn from rows: killed anywhere, they resume to the same bits."""

import random

import pytest

from tests.training import small
from tests.training.preferences import recipe_values, verdict_rows, write_jsonl

PLACES = {
    "update": ("posttrain.training.optimizer:Optimizer.collect", 30),
    "optimizer": ("posttrain.training.optimizer:Optimizer.step", 8),
    "metrics": ("posttrain.runs.metrics:MetricsLog.write", 12),
    "sync": ("os:fsync", 80),
    "rename": ("pathlib:Path.rename", 8),
    "references": ("numpy:savez", 2),
}
"""Where a process dies, and about how often that place is passed in a whole run."""

VARIANTS = {
    "sft": ("sft", {}),
    "streamed": ("sft", {"steps": 7}),
    "dpo": ("dpo", {"supervised": 0.2}),
    "kto": ("dpo", {"loss": {"type": "kto"}}),
    "reward": ("reward", {}),
    "reward_lora": ("reward", {}),
}


def values(variant, tiny, folder):
    folder.mkdir(exist_ok=True)
    stage, changes = VARIANTS[variant]
    found = recipe_values(stage, tiny, folder, **changes)
    if variant == "streamed":
        found["data"] |= {"streaming": True, "shuffle_rows": 7}
        found["epochs"] = 1
    if variant == "kto":
        found["data"]["train"] = write_jsonl(folder / "judged.jsonl", verdict_rows(13))
        found["data"]["validation"] = write_jsonl(folder / "judged_too.jsonl", verdict_rows(4))
    if variant == "reward_lora":
        found["model"] |= {"lora": {"rank": 4}}
    return found


@pytest.fixture(scope="module")
def whole_runs(tiny_model, tmp_path_factory):
    """Variant -> its run without interruption, made when first asked for."""
    made = {}

    def run(variant):
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant) / "whole"
            assert small.run(values(variant, tiny_model, folder)) == 0, (folder / "log.txt").read_text()
            made[variant] = folder / "small"
        return made[variant]

    return run


def killed_and_finished(variant, tiny, folder, deaths):
    recipe = values(variant, tiny, folder)
    for death in deaths:
        small.run(recipe, resume=(folder / "small").exists(), die_at=death)
    assert small.run(recipe, resume=(folder / "small").exists()) == 0, (folder / "log.txt").read_text()
    return folder / "small"


def same(run, reference):
    assert small.weights(run) == small.weights(reference)
    assert small.metrics(run) == small.metrics(reference)


@pytest.mark.parametrize(
    ("variant", "place"),
    [
        ("sft", "sync"),
        ("streamed", "optimizer"),
        ("dpo", "references"),
        ("dpo", "update"),
        ("kto", "metrics"),
        ("reward", "rename"),
        ("reward_lora", "optimizer"),
    ],
)
def test_killed_there_it_resumes_to_the_same_bits(variant, place, tiny_model, tmp_path, whole_runs):
    draw = random.Random(f"{variant} {place}")
    what, most = PLACES[place]
    run = killed_and_finished(variant, tiny_model, tmp_path / "runs", [(what, draw.randint(1, most)) for _ in range(2)])
    same(run, whole_runs(variant))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chain", range(3))
def test_killed_many_times_anywhere(chain, variant, tiny_model, tmp_path, whole_runs):
    draw = random.Random(f"{variant} {chain}")
    deaths = []
    for _ in range(4):
        what, most = PLACES[draw.choice(list(PLACES))]
        deaths.append((what, draw.randint(1, most)))
    same(killed_and_finished(variant, tiny_model, tmp_path / "runs", deaths), whole_runs(variant))
