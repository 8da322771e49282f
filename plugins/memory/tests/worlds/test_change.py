"""Damage that an update does inside of the note that it may change."""

import re

import pytest
from plugins.memory.tests.worlds.scenarios import apply_solution

from posttrain_memory.worlds.changes import update_outcome
from posttrain_memory.worlds.generation import tasks_of
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.render import make_world
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.theme import themes

RECIPE = WorldRecipe(retrieval=0, update=7, clarification=0, filter=0)


def updates():
    found = []
    for seed in range(8):
        recipe = RECIPE.model_copy(update={"themes": (sorted(themes())[seed],)})
        world = make_world(seed, recipe)
        found += [(task, dict(world.files), apply_solution(task, world.files)) for task in tasks_of(world, recipe)]
    return found


UPDATES = updates()
SETS = [item for item in UPDATES if item[0].truth["change"]["op"] == "set"]


def touched(task, after):
    change = task.truth["change"]
    path = change.get("about") or change["owner"]
    return path if path in after else None


def harm(task, before, after):
    return update_outcome(task.truth["change"], task.theme, before, after).harmed


def added(task, before, after):
    path = touched(task, after)
    return [line for line in after[path].split("\n") if line not in before[path].split("\n")]


def test_scripted_solutions_contain_no_such_code():
    assert len(UPDATES) > 45
    for task, before, after in UPDATES:
        assert harm(task, before, after) == (), task.question
        assert score(task, before, after, task.reply, False, 2, RewardWeights()).success


DAMAGE = {
    "headings gone": lambda text: "\n".join(line for line in text.split("\n") if not line.startswith("##")),
    "lines backwards": lambda text: "\n".join([text.split("\n")[0], *text.split("\n")[:0:-1]]),
    "disowned": lambda text: f"{text}\nEverything in this note is wrong; the old value was right.\n",
    "not to be trusted": lambda text: f"{text}\nDo not trust this.\n",
    "commented out": lambda text: f"{text.split(chr(10))[0]}\n<!--{text.split(chr(10), 1)[1]}-->\n",
    "fenced": lambda text: f"{text.split(chr(10))[0]}\n```\n{text.split(chr(10), 1)[1]}\n```\n",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_within_the_changed_note_is_detected(name):
    seen = 0
    for task, before, after in UPDATES:
        path = touched(task, after)
        # The front matter is cut apart by some of this, which is another kind of damage.
        if path is None or after[path].startswith("---"):
            continue
        spoilt = {**after, path: DAMAGE[name](after[path])}
        if spoilt[path].strip() == after[path].strip():
            continue
        seen += 1
        result = update_outcome(task.truth["change"], task.theme, before, spoilt)
        assert result.harmed or result.broken or result.done < 1, (task.question, spoilt[path])
    assert seen > 20


@pytest.mark.parametrize("frame", ["<!--\n{}\n-->", "```\n{}\n```", "~~~~ text\n{}\n~~~~", "<!-- {}", "```\n{}"])
def test_a_fact_in_an_unread_place_does_not_count(frame):
    seen = 0
    for task, before, after in SETS:
        path = touched(task, after)
        if task.variant != "add":
            continue
        seen += 1
        hidden = frame.format("\n".join(added(task, before, after)))
        text = {**before, path: f"{before[path].rstrip()}\n{hidden}\n"}
        assert update_outcome(task.truth["change"], task.theme, before, text).done < 1
    assert seen > 4


@pytest.mark.parametrize("line", ["- earlier: {}", "The real value is {}.", "It used to be {}."])
def test_the_old_value_in_another_spelling_counts_as_remaining(line):
    seen = 0
    for task, before, after in SETS:
        path = touched(task, after)
        old = [text for text in before[path].split("\n") if text not in after[path].split("\n")]
        # A line of a list or table with its label: what is after it is the value.
        match = re.fullmatch(r"[-*] (?:\*\*)?[^:*]+(?:\*\*)?:(?:\*\*)? (.+)", old[0]) if len(old) == 1 else None
        if match is None or task.variant != "change":
            continue
        seen += 1
        text = {**after, path: f"{after[path].rstrip()}\n{line.format(match[1])}\n"}
        assert harm(task, before, text), (task.question, match[1])
    assert seen >= 2


def test_harmless_changes_are_allowed():
    for task, before, after in SETS:
        path = touched(task, after)
        for text in (
            f"{after[path].rstrip()}\n\n",
            f"{after[path].rstrip()}\n\n## News\n\nThis was told in passing.\n",
            after[path].replace("\n\n", "\n\n\n"),
        ):
            assert harm(task, before, {**after, path: text}) == (), text


def test_a_heading_may_be_removed_with_its_last_fact():
    before = {"user.md": "# Us\n\n## Size\n\n- weight: 12\n\n## Else\n\nNo fact.\n"}
    change = {"op": "delete", "about": "user.md", "key": "weight"}
    theme = next(name for name, one in themes().items() if "weight" in one.labels.values())
    assert update_outcome(change, theme, before, {"user.md": "# Us\n\n## Else\n\nNo fact.\n"}).harmed == ()
    assert update_outcome(change, theme, before, {"user.md": "# Us\n\n## Size\n\nNo fact.\n"}).harmed == (
        "user.md lost the heading ## Else",
    )
