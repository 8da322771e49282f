"""The recipes of the HelpSteer3 and rationale experiments: they resolve, match their pages, and run."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from pyarrow import Table, parquet

from posttrain.cli.main import main
from posttrain.models.reward import RewardModel
from posttrain.planning.memory import memory_estimate
from posttrain.planning.model_sizes import published_sizes
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.pipeline import load_pipeline
from posttrain.recipe.sources import RecipeLoader
from posttrain.recipe.warnings import recipe_warnings
from posttrain_environments.rationales.dataset import write_dataset
from tests.journeys.helpsteer3 import ENOUGH, author_files

ROOT = Path(__file__).parents[2]
PLAYED = ["ppo", "drca", "unit_ppo", "unit_ppo_outcome"]
RLHF = {"sft": "sft", "dpo": "dpo", "reward": "reward", "unit_reward": "reward"} | dict.fromkeys(PLAYED, "rl")
STAGES = {f"recipes/helpsteer3/{name}.yaml": name for name in ("reward", "rl")}
STAGES |= {f"recipes/rlhf/{name}.yaml": stage for name, stage in RLHF.items()}
PAGES = {
    name: (ROOT / "docs" / "migrating" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("helpsteer3", "openrlhf")
}
FIT = re.search(r"^## [^\n]*`posttrain fit-normalizer`\n(.*?)(?=^## |\Z)", PAGES["openrlhf"], re.M | re.S)[1]
"""The section about a command that has no recipe of its own."""
COMMANDS = 35
"""On both pages, without mentions of a subcommand alone."""
HELPSTEER_FILES = {
    "pairs_train": {"chosen": "a", "rejected": "b"},
    "pairs_validation": {"chosen": "a", "rejected": "b"},
    "prompts": {},
}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory):
    """A folder with small files and models under the names that the recipes of both pages give them."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    write_dataset(folder / "data" / "rationales", 0, {"train": 20, "val": 6, "test": 6})
    author_files(folder, ENOUGH)
    (folder / "sft.parquet").symlink_to(folder / "data/rationales/sft/rationales_sft_train.parquet")
    place = folder / "runs/helpsteer3/data"
    place.mkdir(parents=True)
    for name, columns in HELPSTEER_FILES.items():
        rows = [{"prompt": f"Task {n}.", **columns, "n": n} for n in range(1100)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    RewardModel(ModelRecipe(path=str(tiny_model)), seed=0).export(folder / "reward-model")
    for run in ("rlhf-sft", "rlhf-reward", "rlhf-unit_reward", "helpsteer3-reward", "helpsteer3/rl", "rlhf/dpo"):
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "model").symlink_to(folder / "reward-model" if "reward" in run else tiny_model)
    return folder


@pytest.fixture
def in_made(made, monkeypatch):
    monkeypatch.chdir(made)


def blocks(text, language=""):
    """The fenced blocks in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [block for name, block in found if name == language]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def values_at(values, key):
    """The value of the dumped recipe at a dotted key."""
    return functools.reduce(lambda inside, part: inside[part], key.split("."), values)


@pytest.mark.usefixtures("in_made")
@pytest.mark.parametrize("path", STAGES)
def test_a_recipe_resolves_and_every_key_has_an_effect(path, capsys):
    assert main([STAGES[path], path, "--dry-run", "--full"]) == 0
    said = capsys.readouterr().out
    assert f"recipe ({STAGES[path]})" in said
    assert "warning:" not in said
    assert recipe_warnings(load_recipe([path], [], STAGES[path])) == []


CHAINS = {
    "helpsteer3": {"reward": ["data"], "rl": ["data", "reward"]},
    "rlhf": {
        "sft": [],
        "unit_ppo": ["sft", "unit_reward"],
        **{name: ["sft"] for name in ("dpo", "reward", "unit_reward")},
        **{name: ["sft", "reward"] for name in ("ppo", "drca", "unit_ppo_outcome")},
    },
}
"""Folder of a pipeline -> its stages with the stages that they use."""


@pytest.mark.usefixtures("in_made")
@pytest.mark.parametrize("folder", CHAINS)
def test_a_pipeline_chains_the_recipes(folder, capsys):
    file = f"recipes/{folder}/pipeline.yaml"
    assert main(["pipeline", file, "--dry-run", "--full"]) == 0
    assert "warning:" not in capsys.readouterr().out
    stages = [stage for stage in load_pipeline(file, []).stages if stage.recipe.stage != "convert"]
    assert {stage.name: sorted(stage.inputs) for stage in stages} == {
        name: sorted(inputs) for name, inputs in CHAINS[folder].items()
    }
    first = {"helpsteer3": "Qwen/Qwen3-8B", "rlhf": "Qwen/Qwen3-4B"}[folder]
    for stage in stages:
        assert stage.recipe.model.path == ("runs/rlhf/sft/model" if "sft" in stage.inputs else first)

    def without_places(recipe):
        """Its text, with the runs of recipes alone (runs/rlhf-sft) and those in the pipeline (runs/rlhf/sft) under the same names."""
        values = recipe.model_dump(mode="json") | {"name": None, "runs": None}
        return re.sub(rf"runs/{folder}[-/](\w+)(/model)?", r"\1", json.dumps(values))

    for stage in stages:
        alone = load_recipe([f"recipes/{folder}/{stage.name}.yaml"], [], stage.recipe.stage)
        assert without_places(stage.recipe) == without_places(alone)
    by_name = {stage.name: stage.recipe for stage in stages}
    if folder == "helpsteer3":
        assert by_name["rl"].reward.path == "runs/helpsteer3/reward/model"
    else:
        assert by_name["ppo"].reward.path == by_name["ppo"].critic.path == "runs/rlhf/reward/model"
        assert by_name["unit_ppo"].reward.path == by_name["unit_ppo"].unit_credit.normalizer
        assert by_name["unit_ppo"].reward.path == "runs/rlhf/unit_reward/model"


def test_the_table_of_the_fit_matches_its_run():
    recipe = load_recipe(["recipes/rlhf/unit_reward.yaml"], [], "reward").model_dump(mode="json")
    lines = [line for line in FIT.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines[2:]]
    command = next(block for block in blocks(FIT) if "\n\nposttrain" in block)
    original = shlex.split(command.split("\n\n")[0].replace("\\\n", " "))
    assert [row[2].strip("`") for row in rows[:4]] == original[2:]
    for _, name, _, keys, values, _ in rows:
        for key, value in zip(quoted(keys), quoted(values), strict=True):
            ours = values_at(recipe, key)
            ours = ours[0]["path"] if isinstance(ours, list) else ours
            assert ours == yaml.load(value, RecipeLoader), f"{name}: {key}"
    assert f"posttrain fit-normalizer runs/{recipe['name']}\n" in FIT


def test_the_numbers_of_rl_multiply_out():
    """Updates as the original's schedule plans them: answers of one pass / answers of an update x times gone through."""
    for name, answers, planned in (("ppo", 512, 38), ("drca", 512, 19), ("unit_ppo", 128, 40)):
        text = (ROOT / f"recipes/rlhf/{name}.yaml").read_text()
        recipe = load_recipe([f"recipes/rlhf/{name}.yaml"], [], "rl")
        sampled = recipe.rollout.groups_per_step * recipe.rollout.episodes_per_group
        assert sampled == answers * recipe.learner.updates_per_step
        updates = recipe.steps * recipe.learner.updates_per_step * recipe.learner.epochs_per_step
        whole = 5000 * recipe.rollout.episodes_per_group // answers * recipe.learner.epochs_per_step
        assert (updates, abs(updates - whole) <= 1) == (planned, True)
        assert f"{updates} updates" in text
        assert recipe.optimizer.warmup_updates == -(-updates * 0.03 // 1)
        assert recipe.critic.optimizer.warmup_updates == recipe.optimizer.warmup_updates
        assert [source.use for source in recipe.environment.prompts] == ["training", "validation", "test"]


def test_the_outcome_baseline_differs_only_in_its_reward():
    outcome, unit = (load_recipe([f"recipes/rlhf/{name}.yaml"], [], "rl") for name in ("unit_ppo_outcome", "unit_ppo"))
    differing = {key for key in type(unit).model_fields if getattr(outcome, key) != getattr(unit, key)}
    assert differing == {"name", "reward", "unit_credit"}
    assert outcome.reward == unit.reward.model_copy(update={"path": outcome.reward.path})


def test_the_numbers_of_the_documents_multiply_out():
    rl = load_recipe(["recipes/helpsteer3/rl.yaml"], [], "rl")
    answers = rl.rollout.groups_per_step * rl.rollout.episodes_per_group
    assert answers == 2 * 8 == rl.loss.constant
    assert rl.steps * answers == 50_000
    assert (rl.evaluation.held_out, rl.evaluation.seeds.count) == (400, 100)
    for name, updates, share in (("sft", 3 * -(-5000 // 64), 0.03), ("dpo", -(-10_000 // 240), 0.03)):
        recipe = load_recipe([f"recipes/rlhf/{name}.yaml"], [], name)
        assert f"{updates} updates" in (ROOT / f"recipes/rlhf/{name}.yaml").read_text()
        assert recipe.optimizer.warmup_updates == -(-updates * share // 1)


def test_the_memory_is_what_the_document_allows():
    """In gigabytes of 10**9 bytes. test_quoted_memory.py compares the page with the plan."""
    for name, most in (("reward", 24), ("rl", 40)):
        recipe = load_recipe([f"recipes/helpsteer3/{name}.yaml"], [], name)
        estimate = memory_estimate(recipe, published_sizes("Qwen3-8B"))
        assert sum(count for count, _ in estimate.values()) < most * 1e9


def test_the_published_form_differs_where_its_table_says():
    section = re.search(r"^## As published.*?\n(.*?)^## ", PAGES["helpsteer3"], re.M | re.S)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    files = [f"recipes/helpsteer3/{name}.yaml" for name in ("rl", "rl_published")]
    ours, published = (
        load_recipe(files[:count], [], "rl").model_dump(mode="json") | {"name": None} for count in (1, 2)
    )
    for key, *cells in rows:
        for values, cell in zip((ours, published), cells, strict=True):
            value = yaml.safe_load(re.sub(r"^1e", "1.0e", cell.strip("`")))
            assert cell == "adapters" or values_at(values, quoted(key)[0]) == value, key
    keys = [(section, key) for section, values in ours.items() if isinstance(values, dict) for key in values]
    changed = {f"{section}.{key}" for section, key in keys if ours[section][key] != published[section][key]}
    assert changed == {quoted(key)[0] for key, *_ in rows}


@pytest.fixture
def own_prompts(made):
    """Prompts of a user: 300 conversations, without the columns of our data."""
    rows = [{"context_messages": [{"role": "user", "content": f"Write procedure {n}."}]} for n in range(300)]
    file = made / "prompts.parquet"
    parquet.write_table(Table.from_pylist(rows), file)
    return file


@pytest.mark.usefixtures("in_made")
@pytest.mark.parametrize("name", PLAYED)
def test_rl_accepts_custom_prompts_without_seeds_or_labels(name, own_prompts, capsys):
    assert main(["rl", f"recipes/rlhf/{name}.yaml", f"environment.prompts={own_prompts.name}", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "300 rows" not in said
    assert "240 to train on, 30 for the learning curve, 30 for the final table" in said
    assert "verifier:scores is not reported, because no row of environment.prompts has a column `label`" in said
    assert "there are 240 tasks to train on, so a step samples some of them more than once" in said


@pytest.mark.slow
@pytest.mark.usefixtures("in_made", "own_prompts")
def test_every_command_of_the_pages_resolves(capsys):
    seen = 0
    for page in PAGES.values():
        lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
        commands = [line for line in lines if line.startswith("posttrain ")]
        commands += re.findall(r"`(posttrain [^`]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S))
        for command in dict.fromkeys(commands):
            verb, *words = shlex.split(command)[1:]
            if verb in ("data", "fit-normalizer") or "install" in words or not words:
                continue
            seen += 1
            dry = [] if "--dry-run" in words else ["--dry-run"]
            assert main([verb, *words, *dry]) == 0, command
            warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
            # The page says of these that the critic is left out, and a warning says so.
            assert [
                line for line in warnings if not line.startswith("warning: critic has no effect: credit.type")
            ] == [], command
    assert seen == COMMANDS


def test_refusals_on_the_pages_are_exact(capsys):
    (block,) = [block for page in PAGES.values() for block in blocks(page, "console")]
    command, said = block.split("\n", 1)
    assert main([*shlex.split(command)[2:], "--dry-run"]) == 2
    assert capsys.readouterr().err == said
