"""Rows of tasks: apart by world, unique by question, read back whole; records of the published agent; other words."""

import json

import pytest
from plugins.memory.tests.worlds.scenarios import apply_solution

from posttrain.errors import InputError
from posttrain_memory.worlds.dataset import SPLITS, read_row, row_of, samples
from posttrain_memory.worlds.generation import question_key, tasks_of
from posttrain_memory.worlds.paraphrase import Rewording, filler_lines
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.records import is_published_row, read_memories, read_published_row
from posttrain_memory.worlds.render import make_world
from posttrain_memory.worlds.replies import asks
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.truth import parse

COUNTS = {"train": 12, "dev": 4, "test": 4}
RECIPE = WorldRecipe(notes=8)


def test_splits_share_no_world_and_no_question():
    made = list(samples(0, RECIPE, COUNTS))
    worlds = {split: {one.world.seed for one in made if one.split == split} for split in SPLITS}
    titles = {split: {one.world.graph.title for one in made if one.split == split} for split in SPLITS}
    assert {split: len(seeds) for split, seeds in worlds.items()} == COUNTS
    assert len(set.union(*worlds.values())) == len(set.union(*titles.values())) == sum(COUNTS.values())
    assert len({question_key(one.task) for one in made}) == len(made)


def test_more_training_leaves_the_test_as_it_is():
    few = [row_of(one) for one in samples(0, RECIPE, {"test": 3, "dev": 1, "train": 1})]
    many = [row_of(one) for one in samples(0, RECIPE, {"test": 3, "dev": 1, "train": 5})]
    assert many[: len(few)] == few
    assert [row_of(one) for one in samples(1, RECIPE, {"test": 3})] != few


def test_rows_are_json_and_read_back():
    for one in samples(3, RECIPE, {"test": 3}):
        row = json.loads(json.dumps(row_of(one)))
        assert row["context_messages"] == [{"role": "user", "content": one.task.question}]
        task, files = read_row(row)
        assert (task, files) == (one.task, one.world.files)
        assert read_row({"label": row["label"]}) == (task, files)
    for label in ("x", "{}", '{"task": {}}'):
        with pytest.raises(InputError):
            read_row({"label": label})


def test_records_of_the_published_agent_are_read(tmp_path):
    line = "~/~/~/~/~/~/~/~/~/~/~/~"

    def row(kind, question, answer):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
        return {"context_messages": messages, "label": f"{kind}\n\n{line}\n\nmem1\n\n{line}\n\n{answer}"}

    memory = {
        "mem_id": "mem1",
        "user_md": "# Me\n",
        "entities": [
            {"entity_name": "Bo", "entity_file_path": "x/entities/bo.md", "entity_file_content": "- age: 3\n"}
        ],
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "base_memory.json").write_text(json.dumps(memory))
    memories = read_memories(tmp_path).vaults
    files = {"user.md": "# Me\n", "entities/bo.md": "- age: 3\n"}
    assert memories == {"mem1": files}

    task, vault = read_published_row(row("retrieval", "Born when?", "May 3, 2024"), memories)
    assert vault == files
    assert score(task, vault, vault, "On 2024-05-03.", False, 2, RewardWeights()).success
    assert not score(task, vault, vault, "On 2024-05-04.", False, 2, RewardWeights()).success
    text, _ = read_published_row(row("retrieval", "Job?", "software engineer"), memories)
    assert score(text, vault, vault, "A Software Engineer.", False, 2, RewardWeights()).success
    doubt, _ = read_published_row(row("clarification", "How tall is Marta?", "unused"), memories)
    assert score(doubt, vault, vault, "I know no Marta. Who is that?", True, 2, RewardWeights()).success
    assert not score(doubt, vault, vault, "Marta is tall.", False, 2, RewardWeights()).success
    # A recorded reply is right in any form, and short words of a question are what it is about.
    for gold in ("I cannot find it.", "Marta is not in the notes", "Say more.", "31 and 33 are both given: which?"):
        known, _ = read_published_row(row("clarification", "Who is Bo?", gold), memories)
        assert score(known, vault, vault, gold, asks(gold), 2, RewardWeights()).success
        assert score(known, vault, vault, "Which Bo do you mean?", True, 2, RewardWeights()).success
        missed = score(known, vault, vault, "Who do you mean?", True, 2, RewardWeights())
        assert missed.faults == ("it did not say what is missing (bo)",)
    for gold in ("He has no car.", "True", "Bern, not Basel", "12 May 2020 or so"):
        known, _ = read_published_row(row("retrieval", "What?", gold), memories)
        assert score(known, vault, vault, gold, asks(gold), 2, RewardWeights()).success
    tail = "<filter>No names.</filter>\n<answer>12</answer>"
    filtered, _ = read_published_row(row("retrieval", "How many?", tail), memories)
    assert filtered.kind == "filter"
    assert filtered.question == "How many?\nPrivacy rule: No names."
    assert filtered.reply == "12"
    with pytest.raises(InputError, match=r"environment\.judge"):
        read_published_row(row("update", "Note it", "Note it"), memories)
    update, _ = read_published_row(row("update", "Note it", "Note it"), memories, frozenset({"update"}))
    with pytest.raises(InputError):
        score(update, vault, vault, "ok", False, 1, RewardWeights())

    assert is_published_row(row("update", "a", "b"))
    assert not is_published_row({"label": "{}"})
    for wrong in (row("nonsense", "a", "b"), {**row("update", "a", "b"), "label": "update"}):
        with pytest.raises(InputError):
            read_published_row(wrong, memories)
    with pytest.raises(InputError, match="mem1"):
        read_published_row(row("update", "a", "b"), {})
    (tmp_path / "a" / "base_memory.json").write_text("[]")
    with pytest.raises(InputError, match="base_memory"):
        read_memories(tmp_path)


def gentle(text):
    """Other words that change no fact."""
    return text.replace("Tell me", "I would like to know").replace("The ", "So the ").replace("What is", "What then is")


FORGERS = {
    "drops digits": lambda text: "".join("9" if c.isdigit() else c for c in text),
    "adds a number": lambda text: f"{text} And 17 more.",
    "adds a line": lambda text: f"{text}\n- weight: 3 kg",
    "adds a link": lambda text: f"{text} [[user.md]]",
    "says nothing": lambda text: "",
    "adds a mark": lambda text: f"<reply>{text}</reply>",
    "drops names": lambda text: " ".join(word for word in text.split() if not word[0].isupper()) or "so",
    "denies": lambda text: f"It is not true that {text}",
    "long": lambda text: text * 9,
}


def test_paraphrases_keep_every_fact_and_task():
    reword = Rewording(gentle)
    recipe = WorldRecipe(notes=10, filler=(3, 6))
    world = make_world(3, recipe)
    new, tasks = reword(world, recipe)
    assert reword.counts["reworded"] > 10
    assert new.files != world.files
    assert parse(new.files, world.graph.theme_name).statements == world.graph.statements()
    assert {task.question for task in tasks} != {task.question for task in tasks_of(new, recipe)}
    for task in tasks:
        after = apply_solution(task, new.files)
        assert score(task, new.files, after, task.reply, asks(task.reply), 3, RewardWeights()).success


@pytest.mark.parametrize("name", FORGERS)
def test_paraphrases_that_change_facts_are_rejected(name):
    recipe = WorldRecipe(notes=8, filler=(2, 4))
    world = make_world(4, recipe)
    reword = Rewording(FORGERS[name])
    new, tasks = reword(world, recipe)
    parsed = parse(new.files, world.graph.theme_name)
    assert parsed.statements == world.graph.statements()
    assert not parsed.broken
    assert reword.counts["stayed"] > 10
    if name not in ("denies", "drops names"):
        assert reword.counts["reworded"] == 0
    for task, old in zip(tasks, tasks_of(new, recipe), strict=True):
        assert task.question == old.question or name == "drops names"


def test_filler_lines_state_no_fact():
    world = make_world(6, WorldRecipe(notes=8, filler=(2, 3)))
    theme = world.graph.theme_name
    assert any(filler_lines(path, world.files, theme) for path in world.files)
    for path in world.files:
        for line in filler_lines(path, world.files, theme):
            without = {**world.files, path: world.files[path].replace(line, "")}
            assert parse(without, theme).statements == world.graph.statements()
