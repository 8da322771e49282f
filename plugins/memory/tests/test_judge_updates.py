"""Updates in the published format: without a programmatic truth a judge must approve, and damage is detected without one."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plugins.memory.tests.agent.scripts import code, reply

from posttrain.cli.main import main
from posttrain.environments.game import play
from posttrain.errors import InputError
from posttrain_memory.environment import Memory, assignment
from posttrain_memory.recipe import MemoryRecipe
from posttrain_memory.worlds.published import named_notes, published_outcome
from posttrain_memory.worlds.recipe import RewardWeights
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.task import MemoryTask

from .judges import frames, judge, points
from .worlds.test_records import entity, record, write

NOTES = {
    "user.md": """# About me
- **name**: Ines Okafor
- **employer**: [[entities/brightmoor_studio.md|Brightmoor]]
- **sister**: [[entities/tara_okafor.md]]
- **city**: Lund

Tara Okafor and I run on Sundays.
""",
    "entities/brightmoor_studio.md": """# Brightmoor Studio
- **industry**: animation
- **head**: [[entities/leo_varga.md|Leo]]

The phone of Leo Varga is 555 0101.
""",
    "entities/tara_okafor.md": """---
aliases: [Tee, Little Bear]
---
# Tara Okafor
- **age**: 31
- **phone of [[entities/leo_varga.md|Leo]]**: 555 0101
""",
    "entities/leo_varga.md": """# Leo Varga
- **age**: 50
- **friend**: [[entities/tara_okafor.md]]
""",
}
USER, STUDIO, TARA, LEO = NOTES


def _changed(**texts):
    """The notes with `old -> new` in the note of that name; None deletes it, a text alone makes it."""
    names = {"user": USER, "studio": STUDIO, "tara": TARA, "leo": LEO}
    notes = dict(NOTES)
    for name, change in texts.items():
        path = names.get(name, f"entities/{name}.md")
        if change is None:
            del notes[path]
        elif isinstance(change, str):
            notes[path] = change
        else:
            old, new = change
            assert notes[path].count(old) == 1
            notes[path] = notes[path].replace(old, new)
    return notes


@pytest.mark.parametrize(("message", "named"), [
    ("Tara Okafor turned 32.", {TARA}), ("Tara is 32 now.", {TARA}),
    ("Brightmoor won a prize, and so did Leo.", {STUDIO, LEO}), ("LITTLE BEAR has a new phone", {TARA}),
    ("My sister has a new phone.", {USER, TARA}), ("The employer moved to Malmö.", {STUDIO}),
    ("I moved to Malmö.", {USER}), ("We’ve moved.", {USER}), ("The Okafor family moved.", {TARA}),
    ("entities/leo_varga.md is out of date", {LEO}), ("Starlight moved.", set()), ("", set()),
])  # fmt: skip
def test_the_notes_that_a_message_names(message, named):
    assert named_notes(message, NOTES) == named


RIGHT = {
    "a fact of a named note": ("Tara is 32 now.", _changed(tara=("31", "32"))),
    "a fact of the user": ("I live in Malmö now.", _changed(user=("Lund", "Malmö"))),
    "by relation": ("My sister is 32 now.", _changed(tara=("31", "32"))),
    "a new note": (
        "I met Jo Lind at the pool.",
        _changed(user=("- **city**", "- **friend**: [[entities/jo_lind.md]]\n- **city**"), jo_lind="# Jo Lind\n"),
    ),
    "a new note with a link from a note that is not named": (
        "Jo Lind is the friend of a friend.",
        _changed(leo=("- **age**", "- **friend of**: [[entities/jo_lind.md]]\n- **age**"), jo_lind="# Jo Lind\n"),
    ),
    "a note deleted, and a list without it": (
        "Forget Tara Okafor.",
        {
            USER: NOTES[USER]
            .replace("- **sister**: [[entities/tara_okafor.md]]\n", "")
            .replace("Tara Okafor and ", ""),
            STUDIO: NOTES[STUDIO],
            LEO: NOTES[LEO].replace("- **friend**: [[entities/tara_okafor.md]]\n", ""),
        },
    ),
    "a note deleted": (
        "Forget Leo.",
        _changed(
            leo=None,
            studio=("- **head**: [[entities/leo_varga.md|Leo]]\n\nThe phone of Leo Varga is 555 0101.\n", ""),
            tara=("- **phone of [[entities/leo_varga.md|Leo]]**: 555 0101\n", ""),
        ),
    ),
    "another employer, the old one kept": (
        "I am with Glasswing now.",
        _changed(
            user=(
                "- **employer**: [[entities/brightmoor_studio.md|Brightmoor]]",
                "- **employer**: [[entities/glasswing.md]]\n- **before**: [[entities/brightmoor_studio.md]]",
            ),
            glasswing="# Glasswing\n",
        ),
    ),
}
WRONG = {
    "nothing": ("Tara is 32 now.", NOTES, ""),
    "white space only": ("Tara is 32 now.", _changed(tara=("31\n", "31  \n\n")), ""),
    "another note, too": ("Tara is 32 now.", _changed(tara=("31", "32"), leo=("50", "51")), "leo_varga.md was changed"),
    "the user's facts": ("Tara is 32 now.", _changed(tara=("31", "32"), user=("Lund", "Malmö")), "user.md was changed"),
    "another note deleted": ("Tara is 32 now.", _changed(tara=("31", "32"), leo=None), "leo_varga.md is gone"),
    "the user deleted": ("I moved.", {TARA: NOTES[TARA]}, "user.md is gone"),
    "a new note that nobody named": (
        "I moved to Malmö.",
        _changed(user=("- **city**: Lund", "- **city**: [[entities/x.md]]"), x="# Plans of Conquest\n"),
        "x.md is new",
    ),
    "a link to nothing": ("I moved.", _changed(user=("Lund", "[[entities/malmo.md]]")), "malmo"),
    "a new note that is not reached": ("Jo Lind called Tara.", _changed(jo_lind="# Jo Lind\n"), "not reached"),
    "a note that is not reached any more": (
        "I am with Glasswing now.",
        _changed(
            user=("- **employer**: [[entities/brightmoor_studio.md|Brightmoor]]", "- **employer**: Glasswing"),
            tara=("- **phone of [[entities/leo_varga.md|Leo]]**: 555 0101\n", ""),
        ),
        "not reached",
    ),
    "a deleted note, its links left": ("Forget Leo.", _changed(leo=None), "links to"),
    "what a named note says of another": (
        "Tara is 32 now.",
        _changed(tara=("31\n- **phone of [[entities/leo_varga.md|Leo]]**: 555 0101", "32")),
        "phone of",
    ),
    "a sentence on another in a named note": (
        "Brightmoor does games now.",
        _changed(studio=("animation", "games"), leo=("- **age**: 50", "- **age**: 50\n"))
        | {STUDIO: "# Brightmoor Studio\n- **industry**: games\n- **head**: [[entities/leo_varga.md|Leo]]\n"},
        "Leo Varga",
    ),
    "a book": ("Tara is 32 now.", _changed(tara=("31", "32, " + "and so on, " * 400)), "characters longer"),
    "moved": (
        "Tara is 32 now.",
        {("entities/l.md" if path == LEO else path): text for path, text in NOTES.items()},
        "leo_varga.md is gone",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_allowed_side_effects_of_a_right_update(name):
    message, after = RIGHT[name]
    found = published_outcome(message, NOTES, after)
    assert found.harmed == ()
    assert found.broken == ()
    assert found.done == 1


@pytest.mark.parametrize("name", WRONG)
def test_damage_is_detected_without_a_judge(name):
    message, after, fault = WRONG[name]
    found = published_outcome(message, NOTES, after)
    assert fault in " ".join((*found.harmed, *found.broken))
    assert found.done == 0 if not fault else found.harmed or found.broken
    task = MemoryTask("update", "document", "foreign", message, 0, {"judge": message}, [message])
    scored = score(task, NOTES, after, "Done.", False, 1, RewardWeights(check_first=0.1), True, judged=1.0)
    assert not scored.success
    assert scored.total <= 0.1
    assert any(fault in text for text in scored.faults) or not fault


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(RIGHT)), st.sampled_from(["user", "studio", "tara", "leo"]), st.data())
def test_a_changed_word_in_another_note_is_damage(name, other, data):
    message, after = RIGHT[name]
    path = {"user": USER, "studio": STUDIO, "tara": TARA, "leo": LEO}[other]
    assume(path in after and path not in named_notes(message, NOTES))
    lines = after[path].split("\n")
    # A line that the update itself has changed, such as a list without the note that is gone, may have other words.
    untouched = NOTES[path].split("\n")
    places = [n for n, line in enumerate(lines) if line.strip() and line in untouched and "jo_lind" not in line]
    place = data.draw(st.sampled_from(places))
    lines[place] += data.draw(st.sampled_from(["x", " and more", "\n- **rank**: 9"]))
    found = published_outcome(message, NOTES, {**after, path: "\n".join(lines)})
    assert found.harmed


TASK = MemoryTask("update", "document", "foreign", "Tara is 32 now.", 0, {"judge": "Tara is 32 now."}, [""])


@pytest.mark.parametrize(("judged", "success"), [(0.0, False), (0.49, False), (0.5, True), (1.0, True)])
def test_both_judgements_must_approve(judged, success):
    weights = RewardWeights(judge=0.4, partial=0.1)
    after = RIGHT["a fact of a named note"][1]
    scored = score(TASK, NOTES, after, "Done.", False, 1, weights, judged=judged)
    assert scored.success is success
    assert scored.total == pytest.approx(1 - 0.4 * (1 - judged) if success else 0)
    assert sum(scored.parts.values()) == scored.total
    for said, asked, fault in ((None, False, "silent"), ("Shall I?", True, "asked")):
        wrong = score(TASK, NOTES, after, said, asked, 1, weights, judged=judged)
        assert not wrong.success
        assert wrong.total == wrong.parts[fault] == -getattr(weights, fault)
    with pytest.raises(InputError, match="judge"):
        score(TASK, NOTES, after, "Done.", False, 1, weights)


@pytest.fixture
def published(tmp_path):
    """Recipe keys of a file with a retrieval and two updates."""
    asked = [("retrieval", "How old is Leo Varga?", "50"), *(("update", m, m) for m in ("Tara is 32 now.", "I moved."))]
    entities = [entity(path[len("entities/") : -len(".md")], text) for path, text in NOTES.items() if path != USER]
    return write(tmp_path, [record(*row) for row in asked], NOTES[USER], entities)


DONE = reply("Done.")
UPDATE = code(f'update_file("{TARA}", "- **age**: 31", "- **age**: 32")')
DAMAGE = code(f'delete_file("{LEO}")')


def honest(asked):
    """Approves if the diff adds the new age and removes the old one."""
    seen = frames(asked["messages"])
    lines = seen["changes"].split("\n")
    return points(9 if "+- **age**: 32" in lines and "-- **age**: 31" in lines else 1, "by rule")(asked)


def test_published_updates_are_tasks_with_a_judge_only(published):
    plain = MemoryRecipe.model_validate(published)
    (message,) = Memory.check_tasks(plain, range(1), [range(0)])
    assert "environment.judge" in message
    with judge(honest) as server:
        recipe = MemoryRecipe.model_validate({**published, "judge": server.keys()})
        assert Memory.check_tasks(recipe, range(3), [range(0)]) == []
        assert [assignment(recipe, seed).task.kind for seed in range(3)] == ["retrieval", "update", "update"]
        Memory.validate(recipe, range(3))
        found = Memory.baselines(recipe, range(3))
        assert server.requests == []
    assert "optimal" not in found
    assert found["random"].n == 3
    assert set(Memory.baselines(plain, range(1))) > {"random", "optimal"}
    environment = Memory(recipe)
    environment.reset(1)
    with pytest.raises(NotImplementedError, match="scripted"):
        environment.expert()


def test_right_wrong_and_harmful_updates(published):
    with judge(honest) as server:
        recipe = MemoryRecipe.model_validate({**published, "judge": server.keys(), "weights": {"judge": 0.2}})
        right = play(Memory(recipe), 1, [UPDATE, DONE])
        wrong = play(Memory(recipe), 1, [code(f'append_file("{TARA}", "- **age**: 33")'), DONE])
        idle = play(Memory(recipe), 1, [DONE])
    assert right[-1].info["success"] is True
    assert right[-1].info["scores"] == {"update": 1.0, "judge": 0.9}
    assert sum(step.reward for step in right) == pytest.approx(1 - 0.2 * 0.1)
    for steps in (wrong, idle):
        assert steps[-1].info["success"] is False
        assert steps[-1].info["scores"] == {"update": 0.0, "judge": 0.1}
        assert sum(step.reward for step in steps) == 0
    (first, *_) = server.seen()
    assert list(first) == ["user", "changes", "reply"]
    assert first["user"] == "Tara is 32 now."
    assert first["changes"].startswith(f"--- {TARA}\n+++ {TARA}\n@@ ")


def test_a_lenient_judge_cannot_make_damage_right(published):
    with judge(points(10)) as server:
        recipe = MemoryRecipe.model_validate({**published, "judge": server.keys()})
        for messages in ([UPDATE, DAMAGE, DONE], [DONE], [UPDATE, reply("Shall I?")]):
            steps = play(Memory(recipe), 1, messages)
            assert steps[-1].info["success"] is False
            assert steps[-1].info["scores"] == {"update": 0.0, "judge": 1.0}
            assert sum(step.reward for step in steps) <= 0
        assert play(Memory(recipe), 1, [UPDATE, DONE])[-1].info["success"] is True


def _plays(asked):
    """A judge for whom half is right, and a model that makes one update and then talks, behind one server."""
    messages = asked["messages"]
    if "you grade" in messages[0]["content"]:
        return points(5 if "32" in frames(messages)["changes"] else 0, "the age is there")(asked)
    return DONE if len(messages) > 2 else UPDATE


def test_the_score_of_the_judge_is_in_the_table_and_in_the_episodes(published, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    environment = {"type": "memory", **published, "judge.model": "m", "judge.cache": "judge.jsonl"}
    engine = {"type": "openai", "model": "player"}
    seeds = {"final_seeds.start": 0, "final_seeds.count": 3}
    with judge(_plays) as server:
        environment["judge.url"] = engine["url"] = server.url
        parts = {"environment": environment, "engine": engine, "evaluation": seeds}
        keys = [f"{part}.{key}={value}" for part, own in parts.items() for key, value in own.items()]
        for name in ("first", "second"):
            capsys.readouterr()
            assert main(["evaluate", *keys, f"name={name}"]) == 0
            assert [asked["model"] for asked in server.requests].count("m") == 3
            assert "judge" in capsys.readouterr().out
    for name in ("first", "second"):
        lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        (final,) = [line for line in lines if line["kind"] == "final"]
        assert (final["score/judge"], final["n"], final["failed"]) == (0.5, 3, 0)
        assert final["success"] == pytest.approx(1 / 3)
    assert main(["episodes", "runs/second", "--step", "0", "--split", "final"]) == 0
    assert capsys.readouterr().out.count("judge 0.50") == 3
