"""What episodes are worth: no wrong one more than a right one, whatever the weights; replies in many words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from posttrain.environments.memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain.environments.memory.worlds.render import make_world
from posttrain.environments.memory.worlds.replies import Answer, asks, declines, holds, told
from posttrain.environments.memory.worlds.rewards import score
from posttrain.environments.memory.worlds.scenarios import scenarios, totals
from posttrain.environments.memory.worlds.task import MemoryTask
from posttrain.environments.memory.worlds.tasks import tasks_of
from posttrain.environments.memory.worlds.themes import THEMES

RECIPE = WorldRecipe(notes=12, retrieval=5, update=7, clarification=4, filter=4)


def some_tasks(seeds):
    found = []
    for seed in seeds:
        recipe = RECIPE.model_copy(update={"themes": (sorted(THEMES)[seed % len(THEMES)],)})
        world = make_world(seed, recipe)
        found += [(task, world.files) for task in tasks_of(world, recipe)]
    return found


TASKS = some_tasks(range(30, 45))


@st.composite
def weights(draw):
    """Any weights that are allowed, often just so."""
    part = st.floats(0, 1, allow_nan=False)
    shares = [draw(part) + 1e-3 for _ in range(4)]
    success = draw(st.floats(0.1, 5))
    partial, first, turns = (success * 0.999 * share / sum(shares) for share in shares[:3])
    rest = {name: draw(part) for name in ("asked", "guessed", "leaked", "damaged", "broken", "silent", "turn")}
    free = draw(st.integers(0, 5))
    return RewardWeights(
        success=success, partial=partial, check_first=first, turns_at_most=turns, free_turns=free, **rest
    )


@pytest.mark.parametrize("task_and_files", TASKS, ids=lambda pair: f"{pair[0].theme}-{pair[0].variant}")
def test_scenarios_are_right_and_wrong_as_they_say(task_and_files):
    task, files = task_and_files
    found = scenarios(task, files)
    assert sum(one.right for one in found) == 3
    assert len({one.name for one in found}) >= 10
    for one in found:
        scored = score(task, files, one.after, one.reply, one.asked, one.turns, RewardWeights(), one.checked_first)
        assert scored.success == one.right, (one.name, one.reply, scored.faults)
        assert scored.total == pytest.approx(sum(scored.parts.values()))
        assert bool(scored.faults) <= (not scored.success)


@settings(max_examples=25, deadline=None)
@given(weights=weights(), place=st.integers(0, len(TASKS) - 1))
def test_nothing_wrong_earns_as_much_as_anything_right(weights, place):
    found = totals(TASKS[place : place + 3], weights)
    right = [scored.total for (_, is_right, _), scores in found.items() if is_right for scored in scores]
    wrong = [scored.total for (_, is_right, _), scores in found.items() if not is_right for scored in scores]
    assert right
    assert wrong
    assert max(wrong) < min(right)


@pytest.mark.parametrize(
    "keys",
    [
        {"partial": 0.8},
        {"partial": 0.5, "check_first": 0.3},
        {"check_first": 1.0},
        {"turns_at_most": 1.0},
        {"success": 0.2},
        {"asked": -0.1},
        {"success": float("inf")},
    ],
)
def test_weights_under_which_wrong_could_beat_right_are_refused(keys):
    with pytest.raises(ValidationError):
        RewardWeights(**keys)


def test_turns_cost_and_looking_first_pays():
    task, files = TASKS[0]
    kept = RewardWeights(check_first=0.1)

    def total(turns, first=False):
        return score(task, files, files, task.reply, task.asks, turns, kept, first).total

    assert total(1) == total(2) == 1
    assert total(3) == pytest.approx(0.99)
    assert total(500) == pytest.approx(0.8)
    assert total(3, first=True) == pytest.approx(1.09)


@pytest.mark.parametrize(
    ("reply", "kind", "value", "said"),
    [
        ("It is €1,250.", "money", "EUR 1250.00", True),
        ("It is 1250.", "money", "EUR 1250.00", True),
        ("It is $1,250.", "money", "EUR 1250.00", False),
        ("On the 3rd: May 3rd, 2024.", "date", "2024-05-03", True),
        ("There are three.", "number", "3", True),
        ("There are three or 4.", "number", "3", False),
        ("Call (201) 555-0123, with +1 in front", "phone", "12015550123", False),
        ("Call +1 (201) 555-0123.", "phone", "12015550123", True),
        ("It is not 3.", "number", "3", False),
        ("It isn't the golden swan.", "name", "golden swan", False),
        ("The Golden Swan!", "name", "golden swan", True),
        ("[[entities/inns/golden_swan.md]]", "name", "golden swan", True),
        ("Golden Swans", "name", "golden swan", False),
        ("Nuts and also eggs", "list", "eggs; nuts", True),
        ("Nuts", "list", "eggs; nuts", False),
    ],
)
def test_values_in_replies(reply, kind, value, said):
    assert holds(reply, Answer(kind, value, "key")) is said


def test_asking_and_declining_are_seen():
    for text in ("Which one?", 'Did you mean "Bo"?', "Please tell me which.", "Could you clarify that."):
        assert asks(text), text
    for text in ("It is 3.", "See https://a.example/?x=1 for it.", "Done."):
        assert not asks(text), text
    for text in ("I can’t share that.", "That is private.", "[hidden]"):
        assert declines(text), text
    assert not declines("It is 3.")
    assert told("not 3", Answer("number", "3", "key"))


def test_a_task_without_a_truth_is_refused():
    from posttrain.errors import InputError

    task = MemoryTask("update", "document", "foreign", "Note it", 0, {"judge": "Note it"}, [""])
    with pytest.raises(InputError, match="judge"):
        score(task, {}, {}, "done", False, 1, RewardWeights())
