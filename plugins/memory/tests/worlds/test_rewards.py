"""Rewards of episodes: no wrong one earns more than a right one for any weights, in many phrasings of replies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.memory.tests.worlds.scenarios import scenario_scores, scenarios
from pydantic import ValidationError

from posttrain_memory.worlds.generation import tasks_of
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.render import make_world
from posttrain_memory.worlds.replies import (
    Answer,
    asks,
    contains_value,
    declines,
    denies_change,
    other_values,
    states_value,
)
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.theme import themes
from posttrain_memory.worlds.truth import parse

RECIPE = WorldRecipe(notes=12, retrieval=5, update=7, clarification=4, filter=4)


def some_tasks(seeds):
    found = []
    for seed in seeds:
        recipe = RECIPE.model_copy(update={"themes": (sorted(themes())[seed % len(themes())],)})
        world = make_world(seed, recipe)
        found += [(task, world.files) for task in tasks_of(world, recipe)]
    return found


TASKS = some_tasks(range(30, 35))
"""Five themes in the quick tests; the slow ones play all."""


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


@pytest.mark.parametrize("seed", [*range(30, 33), *(pytest.param(n, marks=pytest.mark.slow) for n in range(33, 45))])
def test_scenarios_are_scored_as_declared(seed):
    """Every variant of a theme; the seeds are the 15 themes."""
    for task, files in some_tasks([seed]):
        found = scenarios(task, files)
        assert sum(one.right for one in found) == 3
        assert len({one.name for one in found}) >= 10
        for one in found:
            scored = score(task, files, one.after, one.reply, one.asked, one.turns, RewardWeights(), one.checked_first)
            assert scored.success == one.right, (task.variant, task.question, one.name, one.reply, scored.faults)
            assert scored.total == pytest.approx(sum(scored.parts.values()))
            assert bool(scored.faults) <= (not scored.success)


@settings(max_examples=12, deadline=None)
@given(weights=weights(), place=st.integers(0, len(TASKS) - 1))
def test_nothing_wrong_earns_as_much_as_anything_right(weights, place):
    found = scenario_scores(TASKS[place : place + 3], weights)
    right = [scored.total for (_, is_right, _), scores in found.items() if is_right for scored in scores]
    wrong = [scored.total for (_, is_right, _), scores in found.items() if not is_right for scored in scores]
    assert right
    assert wrong
    assert max(wrong) < min(right)


@pytest.mark.parametrize("keys", [
    {"partial": 0.8}, {"partial": 0.5, "check_first": 0.3}, {"check_first": 1.0}, {"code": 0.5},
    {"turns_at_most": 1.0}, {"success": 0.2}, {"asked": -0.1}, {"success": float("inf")},
])  # fmt: skip
def test_weights_under_which_wrong_could_beat_right_are_refused(keys):
    with pytest.raises(ValidationError):
        RewardWeights(**keys)


def test_turns_cost_and_reading_user_md_first_is_rewarded():
    task, files = TASKS[0]
    kept = RewardWeights(check_first=0.1)

    def total(turns, first=False):
        return score(task, files, files, task.reply, task.asks, turns, kept, first).total

    assert total(1) == total(2) == 1
    assert total(3) == pytest.approx(0.99)
    assert total(500) == pytest.approx(0.8)
    assert total(3, first=True) == pytest.approx(1.09)


@pytest.mark.parametrize(
    ("kind", "value", "stating", "others"),
    [
        (
            "money",
            "EUR 1250.00",
            ["It is €1,250.", "It is 1250.", "It is 1.250 €."],
            ["It is $1,250.", "It is $1 250."],
        ),
        ("money", "EUR 1250.50", ["It is 1 250,50 euros."], []),
        ("date", "2024-05-03", ["On the 3rd: May 3rd, 2024."], []),
        ("date", "2023-06-24", ["On 24/06/2023.", "On 2023/06/24."], []),
        ("date", "2024-04-03", ["On 04/03/2024."], []),
        ("date", "2024-03-04", ["On 04/03/2024."], []),
        ("date", "2024-04-04", [], ["On 04/03/2024."]),
        ("number", "3", ["There are three."], ["It is not 3."]),
        ("number", "23", ["There are twenty-three."], []),
        ("number", "1205", ["There are one thousand two hundred and five."], []),
        ("number", "1250", ["There are 1 250."], []),
        ("phone", "12015550123", ["Call (201) 555-0123", "Call +1 (201) 555-0123."], ["Call 555-0123"]),
        ("name", "golden swan", ["The Golden Swan!", "[[entities/inns/golden_swan.md]]"], ["Golden Swans"]),
        ("name", "golden swan", [], ["It isn't the golden swan."]),
        (
            "text",
            "lx-1154",
            ["It is LX 1154.", "It is lx1154", "It is LX–1154"],
            ["It is LX 11546.", "It is LX 115 4."],
        ),
        ("text", "room 4p", ["In room 4 P."], []),
        ("enum", "step-sister", ["It is step sister"], []),
        ("list", "eggs; nuts", ["Nuts and also eggs"], ["Nuts"]),
    ],
)
def test_values_in_replies(kind, value, stating, others):
    wanted = Answer(kind, value, "key")
    assert [reply for reply in stating if not states_value(reply, wanted)] == []
    assert [reply for reply in others if states_value(reply, wanted)] == []


DENIALS = (
    "It is not {}.", "Anything but {}.", "It is certainly not the case that it is {}.", "The value {} is false.",
    "{} is wrong.", "It's {}. That is not true.", "I doubt that it is {}.", "It isn’t {}.",
    "Neither {} nor anything else.", "It is everything except {}.", "It is no longer {}.",
)  # fmt: skip
AFFIRMED = (
    "It is {}.", "It is {}, and nothing else.", "I may not share the phone number, but it is {}.",
    "I cannot share the phone number, her value is {}.", "That is not private. It is {}.", "Not to worry; it is {}.",
    "It is not bad, but {}.", "The notes say it is {}. I did not look elsewhere.", "It's {}!",
)  # fmt: skip
VALUES = (
    ("23", Answer("number", "23", "key")),
    ("EUR 23.50", Answer("money", "EUR 23.50", "key")),
    ("2024-05-03", Answer("date", "2024-05-03", "key")),
    ("+1 201 555 0123", Answer("phone", "12015550123", "key")),
    ("ada@marbridge.example", Answer("email", "ada@marbridge.example", "key")),
    ("the Golden Swan", Answer("name", "golden swan", "key")),
    ("St. Ives", Answer("text", "st ives", "key")),
    ("eggs and nuts", Answer("list", "eggs; nuts", "key")),
)


@pytest.mark.parametrize(("said", "value"), VALUES, ids=lambda item: getattr(item, "type", None))
def test_a_denied_value_does_not_count_as_stated(said, value):
    for text in DENIALS:
        assert not states_value(text.format(said), value), text
    for text in AFFIRMED:
        assert states_value(text.format(said), value), text


def vault_of(*lines, theme="pets"):
    return parse({"user.md": "# Us\n\n" + "\n".join(lines) + "\n"}, theme)


@pytest.mark.parametrize(
    ("reply", "kind", "value", "seen"),
    [
        ("It is 1400, 265, 30 or 305.50.", "money", "EUR 265.00", ["1400", "30", "305.5"]),
        ("It is 16450, or 100 101 102 103.", "money", "EUR 16450.00", ["100101102103"]),
        ("It is 265 or three hundred.", "money", "EUR 265.00", ["300"]),
        ("It is EUR 265, or 30.", "money", "EUR 265.00", ["30"]),
        ("It is EUR 265 for 7 nights.", "money", "EUR 265.00", []),
        ("It is 265.", "money", "EUR 265.00", []),
        ("It is 3, or four, five, six.", "number", "3", ["4", "5", "6"]),
        ("It is 3, 4/5 or 6-7.", "number", "3", ["4", "5", "6", "7"]),
        ("It is one of the best: 3.", "number", "3", []),
        ("It is 2024-05-03 or 1/2/2021.", "date", "2024-05-03", ["2021-02-01"]),
        ("It is (201) 555-0123.", "phone", "12015550123", []),
    ],
)
def test_additional_values_are_detected_in_any_spelling(reply, kind, value, seen):
    key = {"money": "vet_bill", "number": "weight"}.get(kind, "key")
    vault = vault_of("- vet bill: EUR 30", "- fee: EUR 30")
    vault.values["fee"] = {"EUR 30.00"}
    wanted = Answer(kind, value, key)
    assert states_value(reply, wanted)
    assert sorted(other_values(reply, [wanted], vault, themes()["pets"], "What is it?")) == sorted(seen)


def test_listing_all_amounts_answers_no_question_for_one():
    asked = 0
    for task, files in TASKS:
        wanted = task.truth.get("answers", ())
        if task.kind == "filter" or [record["type"] for record in wanted] != ["money"]:
            continue
        amount = wanted[0]["value"].split(" ")[1].removesuffix(".00")
        reply = f"It is one of 1400, {amount}, 30.25, 305.50 and 85.50."
        asked += 1
        assert not score(task, files, files, reply, asks(reply), 2, RewardWeights()).success
        assert score(task, files, files, f"It is {amount}.", False, 2, RewardWeights()).success
    assert asked >= 2


ASKING = [
    "Which one?", 'Did you mean "Bo"?', "Please tell me which.", "Could you clarify that.", "Tell me which one.",
    "There are two. Let me know which one you mean.", "I need to know which one.",
    "What is it? I find no note on it.", "Is it Bo? It is not in the notes. Which one?",
]  # fmt: skip
TELLING = [
    "It is 3.", "See https://a.example/?x=1 for it.", "Done.", "What is it? It is 5.", "Is it 5? Yes.",
    "They tell me it is 5.", "It is 5. Let me know if you need more.",
]  # fmt: skip


def test_asking_and_declining_are_recognized():
    assert [text for text in ASKING if not asks(text)] == []
    assert [text for text in TELLING if asks(text)] == []
    assert all(map(declines, ("I can’t share that.", "That is private.", "[hidden]")))
    assert not declines("It is 3.")
    assert contains_value("not 3", Answer("number", "3", "key"))


def test_asking_back_must_name_what_is_missing():
    seen = {"no_entity": 0, "no_attribute": 0, "contradiction": 0}
    for task, files in TASKS:
        if not task.asks:
            continue
        seen[task.variant] += 1
        point = task.truth["point"][0]

        def success(reply, task=task, files=files):
            return score(task, files, files, reply, asks(reply), 2, RewardWeights()).success

        assert success(task.reply)
        for echo in (
            f"{task.question} Could you tell me?",
            f"You said: {task.question} Can you tell me more?",
            f"Something about {point}: could you tell me more?",
        ):
            assert not success(echo), echo
        if task.variant == "contradiction":
            assert success(f"My notes on {point} contradict each other. Which one is right?")
            assert not success(f"My notes do not tell me about {point}. What is it?")
        else:
            assert success(f"I don’t know that of {point}. Tell me what it is.")
            assert success(f"That of {point} is unknown to me. What is it?")
    assert all(seen.values()), seen


DENYING = [
    "I refuse to do that; I changed nothing.", "Sorry, I can’t do that.", "I did not update the notes.",
    "Nothing was changed.", "No changes were made.", "I left the notes as they were.", "I will not note that.",
]  # fmt: skip
DOING = [
    "Done.", "I noted it.", "I changed the phone; nothing else was changed.", "There is a note on Ada now.",
    "I changed the phone and did not change anything else.", "I removed it, and changed nothing else.",
    "The vet is no longer Ada but Bo.",
]  # fmt: skip


def test_denying_an_update_is_recognized():
    assert [reply for reply in DENYING if not denies_change(reply)] == []
    assert [reply for reply in DOING if denies_change(reply)] == []
