"""Law 10 for the stages that learn from rows: killed anywhere, they resume to the same bits."""

import random
import signal

import pytest

from tests.training import small
from tests.training.preferences import recipe_values, unpaired_rows, write_jsonl

PLACES = {
    "learner": ("posttrain.training.updater:Updater.update", 7),
    "backward": ("posttrain.training.updater:Optimizer.collect", 7),
    "optimizer": ("posttrain.training.updater:Optimizer.step", 7),
    "metrics": ("posttrain.runs.metrics:MetricsLog.write", 12),
    "checkpoint": ("posttrain.training.checkpoint:Checkpoints.save", 7),
    "tensors": ("torch:save", 480),
    "delete": ("shutil:rmtree", 19),
    "sync": ("os:fsync", 170),
    "rename": ("pathlib:Path.rename", 25),
    "replace": ("os:replace", 22),
    "caches": ("numpy:savez", 2),
    "report": ("posttrain.training.results:write_report", 1),
}
"""Where a process dies, and about how often that place is passed in a whole run."""

VARIANTS = {
    "sft": ("sft", {}),
    "sft_streamed": ("sft", {"steps": 7, "epochs": 1}),
    "dpo": ("dpo", {"nll_coefficient": 0.2}),
    "dpo_streamed": ("dpo", {"steps": 7, "epochs": 1}),
    "kto": ("dpo", {"loss": {"type": "kto"}}),
    "kto_lora": ("dpo", {"loss": {"type": "kto"}, "cache_ref_logprobs": False}),
    "bco": ("dpo", {"loss": {"type": "bco"}}),
    "dpo_moving": ("dpo", {"reference": {"update_every": 2, "mix": 0.4}}),
    "kto_moving": ("dpo", {"loss": {"type": "kto"}, "reference": {"update_every": 3}}),
    "reward": ("reward", {}),
    "reward_lora": ("reward", {}),
    "reward_streamed": ("reward", {"steps": 7, "epochs": 1}),
}


def values(variant, tiny, folder):
    folder.mkdir(exist_ok=True)
    stage, changes = VARIANTS[variant]
    found = recipe_values(stage, tiny, folder, **changes)
    if variant.endswith("streamed"):
        # Some rows of each kind of trouble, so that reading them again has to come to the same ones.
        with open(found["data"]["train"], "a") as file:
            file.write('{"messages": []}\nnot JSON\n')
        found["data"] |= {"streaming": True, "shuffle_buffer": 7}
    if variant.startswith("kto"):
        found["data"]["train"] = write_jsonl(folder / "judged.jsonl", unpaired_rows(13))
        found["data"]["validation"] = write_jsonl(folder / "judged_too.jsonl", unpaired_rows(4))
    if variant.endswith("lora"):
        found["model"] |= {"lora": {"rank": 4, "dropout": 0.1}}
    return found


@pytest.fixture(scope="module")
def whole_runs(tiny_model, tmp_path_factory):
    """Variant -> its run without interruption, made when first asked for."""
    made = {}

    def run(variant):
        if variant not in made:
            made[variant] = small.finished(values(variant, tiny_model, tmp_path_factory.mktemp(variant) / "whole"))
        return made[variant]

    return run


def same(run, reference):
    small.assert_same(run, reference, stored=False)
    for name in ("results.json", "model/config.json"):
        # With the mean and standard deviation of a reward model.
        assert (run / name).read_text() == (reference / name).read_text()
    assert len(small.metrics(reference)) > 7
    assert not list((run / "checkpoints").glob("*partial*"))


KILLED = {
    "sft": [("sync", 20), ("report", 1)],
    "sft_streamed": [("checkpoint", 4)],
    "dpo": [("caches", 3), ("learner", 3)],
    "dpo_moving": [("metrics", 6)],
    "kto_moving": [("optimizer", 5)],
    "dpo_streamed": [("tensors", 3)],
    "kto": [("metrics", 5)],
    "bco": [("metrics", 5)],
    "reward": [("rename", 3)],
    "reward_lora": [("optimizer", 4)],
}
"""Where the run of a variant dies in turn."""


@pytest.mark.parametrize("variant", small.cases(KILLED, ["sft_streamed", "dpo"]))
def test_it_resumes_to_the_same_bits_after_a_kill_there(variant, tiny_model, tmp_path, whole_runs):
    recipe = values(variant, tiny_model, tmp_path / "runs")
    deaths = [(PLACES[name][0], count) for name, count in KILLED[variant]]
    assert small.killed(recipe, *deaths) == [-signal.SIGKILL] * len(deaths)
    same(small.finished(recipe), whole_runs(variant))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("part", range(4))
def test_killed_anywhere(part, variant, tiny_model, tmp_path, whole_runs):
    draw = random.Random(f"{variant} {part}")
    names = list(PLACES)[part::4]
    draw.shuffle(names)
    # Early, for each life after a death is a part of the run and passes these places less often.
    deaths = [(what, draw.randint(1, max(most // 3, 1))) for what, most in map(PLACES.get, names)]
    recipe = values(variant, tiny_model, tmp_path / "runs")
    ends = small.killed(recipe, *deaths, figures="report" in names)
    assert ends[0] == -signal.SIGKILL
    assert set(ends) <= {0, -signal.SIGKILL}
    same(small.finished(recipe, figures="report" in names), whole_runs(variant))
