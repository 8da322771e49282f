"""Rows of tasks: apart by world, unique by question, read back whole; records of the published agent."""

import json

import pytest

from posttrain.errors import InputError
from posttrain_memory.worlds.dataset import SPLITS, read_row, row_of, samples
from posttrain_memory.worlds.generation import question_key
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.records import is_published_row, read_memories, read_published_row
from posttrain_memory.worlds.replies import asks
from posttrain_memory.worlds.rewards import score

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
