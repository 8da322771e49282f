"""The two-rollout protocol: an update, then a question in a new conversation about the notes."""

from dataclasses import replace

import pytest
from plugins.memory.tests.agent.scripts import code, reply
from pydantic import ValidationError

from posttrain.environments.game import play
from posttrain_memory.baselines import ASKED_AFTER, NOTES
from posttrain_memory.environment import Memory, assignment
from posttrain_memory.recipe import MemoryRecipe
from posttrain_memory.worlds.generation import read_row, row_of, samples, tasks_of
from posttrain_memory.worlds.recipe import WorldRecipe
from posttrain_memory.worlds.render import make_world
from posttrain_memory.worlds.task import VARIANTS

UPDATES = {"retrieval": 0, "update": 1, "clarification": 0, "filter": 0}


def recipe(**keys):
    return MemoryRecipe.model_validate({"worlds": UPDATES, "follow_up": True, **keys})


def scores(update, notes, after):
    return {"update": update, NOTES: notes, ASKED_AFTER: after}


def solved(task):
    """The messages of the scripted solution."""
    return [*map(code, task.code), reply(task.reply)]


def scored(seed, messages):
    return play(Memory(recipe()), seed, messages)[-1].info["scores"]


def test_the_scripted_solution_of_every_variant_is_followed_up_and_right():
    played = set()
    for seed in range(60):
        steps = play(Memory(recipe()), seed)
        (second,) = [place for place, step in enumerate(steps) if step.new_conversation]
        assert steps[-1].info["scores"] == scores(1.0, 1.0, 1.0)
        assert steps[-1].info["kind"] == "update"
        assert not any("success" in step.info for step in steps[:-1])
        assert [m["role"] for m in steps[second].messages] == ["system", "user"]
        played.add(steps[second].info["variant"])
        assert sum(step.reward for step in steps) == pytest.approx(1, abs=0.05)
    assert played == set(VARIANTS["update"])


@pytest.mark.parametrize(
    "keys",
    [
        {"weights": {"partial": 0.4, "check_first": 0.1}},
        {"weights": {"partial": 0.1}},
        {"weights": {"check_first": 0.1}},
        {"rejected": -0.03},
        {"max_turns": 10},
    ],
    ids=str,
)
def test_weights_with_which_half_of_an_episode_could_earn_as_much_as_all_of_it_are_refused(keys):
    with pytest.raises(ValidationError, match="half wrong"):
        recipe(**keys)
    recipe(**keys, follow_up=False)


@pytest.mark.parametrize(
    "keys", [{}, {"rejected": 0.0, "weights": {"partial": 0.1, "check_first": 0.1}}, {"max_turns": 5}], ids=str
)
def test_a_right_episode_after_rejected_messages_earns_more_than_a_half_wrong_one(keys):
    one = recipe(**keys)
    nonsense = ["nonsense"] * (one.max_turns - 2)
    for seed in range(12):
        task = assignment(one, seed).task
        done, after = reply(task.reply), reply(task.follow_up.reply)
        write = code('read_file("user.md")\n' + "\n".join(task.code))
        right = play(Memory(one), seed, [*nonsense, write, done, *nonsense, "nonsense", after])
        wrong = [play(Memory(one), seed, messages) for messages in ([write, done, "x"], [done, after])]
        assert right[-1].info["success"] is True
        assert not any(steps[-1].info["success"] for steps in wrong if "success" in steps[-1].info)
        assert all(sum(s.reward for s in right) > sum(s.reward for s in steps) for steps in wrong)


def first(variant):
    for seed in range(200):
        if assignment(recipe(), seed).task.variant == variant:
            return seed, assignment(recipe(), seed).task
    raise AssertionError(f"no {variant} in 200 seeds")


def test_a_fact_that_was_not_noted_is_missing_in_the_follow_up():
    seed, task = first("change")
    environment = Memory(recipe())
    environment.reset(seed)
    step = environment.step(reply(task.reply))
    assert step.new_conversation
    assert step.info["faults"] == []
    last = environment.step(reply(task.follow_up.reply))
    # The answer is right by a guess; the notes are not, so the episode is no success and earns half at most.
    assert last.info["scores"] == scores(0.0, 0.0, 1.0)
    assert last.info["success"] is False
    assert step.reward + last.reward <= 0.5
    # Afterwards, the old value is a wrong answer.
    notes = assignment(recipe(), seed).files[task.truth["change"]["about"]]
    assert scored(seed, [*solved(task), reply(notes)])[ASKED_AFTER] == 0.0


@pytest.mark.parametrize("variant", ["delete", "remove"])
def test_asking_for_a_removed_fact_is_right_only_if_it_was_removed(variant):
    seed, task = first(variant)
    asked = reply(task.follow_up.reply)
    undone = play(Memory(recipe()), seed, [reply(task.reply), asked])
    assert undone[-1].info["scores"] == scores(0.0, 0.0, 0.0)
    assert undone[-1].info["faults"] == ["the notes still say it"]
    assert scored(seed, [*solved(task), asked]) == scores(1.0, 1.0, 1.0)
    # The second half is about the notes as they are: it stays right where something else was harmed.
    harmed = [code('append_file("user.md", "x" * 400)'), *solved(task), asked]
    assert scored(seed, harmed) == scores(0.0, 0.0, 1.0)
    if variant == "remove":
        moved = code(f'move_file("{task.truth["change"]["about"]}", "entities/elsewhere.md")')
        assert scored(seed, [moved, reply(task.reply), asked])[ASKED_AFTER] == 0.0


def test_a_right_update_with_a_wrong_follow_up_is_not_a_success():
    seed, task = first("add")
    steps = play(Memory(recipe()), seed, [*solved(task), reply("I do not know.")])
    assert steps[-1].info["scores"] == scores(0.0, 1.0, 0.0)
    assert sum(step.reward for step in steps) < 0.6


def test_baseline_policies_have_columns_of_both_halves():
    found = Memory.baselines(recipe(), range(30))
    assert set(found) == {*Memory.scripted_baselines, "random", "optimal"}
    assert all(set(one.scores) == {"update", NOTES, ASKED_AFTER} for one in found.values())
    assert all(found["optimal"].scores[name][0] == 1 for name in (NOTES, ASKED_AFTER))
    agent = found["rule agent"].scores
    assert 0 < agent["update"][0] <= min(agent[NOTES][0], agent[ASKED_AFTER][0]) < 1
    assert found["one note"].scores[NOTES][0] == 0
    plain = Memory.baselines(recipe(follow_up=False), range(3))
    assert all(set(one.scores) == {"update"} for one in plain.values())


def test_an_update_without_a_reply_still_has_its_follow_up():
    seed, task = first("change")
    one = recipe(max_turns=2)
    steps = play(Memory(one), seed, [code("\n".join(task.code)), code("a = 1")] * 2)
    assert [step.new_conversation for step in steps] == [False, True, False, False]
    assert steps[-1].truncated


def test_other_kinds_and_recipes_have_no_second_half():
    plain = recipe(follow_up=False)
    others = recipe(worlds={**UPDATES, "retrieval": 1, "update": 0, "filter": 1})
    for seed in range(20):
        assert assignment(plain, seed) == assignment(recipe(), seed)
        assert not any(step.new_conversation for one in (plain, others) for step in play(Memory(one), seed))


def test_records_keep_the_follow_up_and_older_records_have_none():
    world = make_world(3, WorldRecipe())
    tasks = [task for task in tasks_of(world, WorldRecipe()) if task.kind == "update"]
    assert all(task.follow_up is not None and task.follow_up.follow_up is None for task in tasks)
    sample = next(s for s in samples(0, WorldRecipe(**UPDATES), {"train": 1}) if s.task.kind == "update")
    task, files = read_row(row_of(sample))
    assert (task, files) == (sample.task, dict(sample.world.files))
    bare = row_of(replace(sample, task=replace(sample.task, follow_up=None)))
    assert read_row({**bare, "files": None})[0].follow_up is None
