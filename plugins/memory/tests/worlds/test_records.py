"""Files as the authors of the published memory agent have them: names that a vault refuses, rows without an answer, true and false,
and folders of evaluation items.
"""

import json

import pytest

from posttrain.cli.main import main
from posttrain.data.held_out import listed_rows
from posttrain.environments.game import play
from posttrain.errors import InputError
from posttrain_memory.environment import Memory
from posttrain_memory.recipe import MemoryRecipe
from posttrain_memory.task_source import task_table
from posttrain_memory.vault.limits import VaultLimits
from posttrain_memory.vault.paths import note_path
from posttrain_memory.worlds.recipe import RewardWeights
from posttrain_memory.worlds.records import accepted, is_published_row, read_memories, read_published_row
from posttrain_memory.worlds.replies import asks, states_truth
from posttrain_memory.worlds.rewards import score

from ..judges import judge, points

LINE = "~/~/~/~/~/~/~/~/~/~/~/~"
ODD = [
    "a:b", "what?", "x*y", 'the "best"', "a<b>c", "p|q", "c#_book", "up^2", "list[1]", "con", " edge. ", "a\u202eb",
    "x" * 300,
]  # fmt: skip


def record(kind, question, answer, memory="m1"):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
    return {"context_messages": messages, "label": f"{kind}\n\n{LINE}\n\n{memory}\n\n{LINE}\n\n{answer}"}


def entity(name, text):
    return {"entity_name": name, "entity_file_path": f"data/m1/entities/{name}.md", "entity_file_content": text}


def write(folder, rows, user_md="# Me\n- **has a licence**: True\n", entities=()):
    (folder / "m1").mkdir(parents=True)
    memory = {"mem_id": "m1", "user_md": user_md, "entities": list(entities)}
    (folder / "m1" / "base_memory.json").write_text(json.dumps(memory))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"tasks": str(folder / "rows.jsonl"), "memories": str(folder)}


def said(recipe, seed, *messages):
    """The last step of an episode in which the policy sends `messages` without thoughts."""
    recipe = MemoryRecipe.model_validate({**recipe, "thinking": False})
    return play(Memory(recipe), seed, messages)[-1]


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_a_vault_refuses_becomes_one_that_it_accepts_in_links_too(name):
    path = f"entities/{name}.md"
    links = [f"[[{path}]]", f"[[entities/{name}|It]]", f"[[{name}.md#age]]", f"[[{name}]]"]
    files, changed = accepted({"user.md": " ".join(links), path: "- age: 3\n", "entities/bo.md": f"[[{path}]]"})
    new = changed[path]
    assert note_path(new, VaultLimits()) == new
    assert files["user.md"] == f"[[{new}]] [[{new}|It]] [[{new}#age]] [[{new}]]"
    assert files["entities/bo.md"] == f"[[{new}]]"
    assert set(files) == {"user.md", "entities/bo.md", new}


def test_names_that_become_equal_stay_different_notes():
    files, _ = accepted({"user.md": "", "entities/a:b.md": "1", "entities/a?b.md": "2", "entities/A-b.md": "3"})
    assert sorted(files.values()) == ["", "1", "2", "3"]
    assert len({path.lower() for path in files}) == 4


def test_rows_that_nothing_can_decide_are_dropped_and_counted(tmp_path, capsys):
    rows = [
        record("retrieval", "How old is Bo?", "3"),
        record("retrieval", "How would Bo like the film?", ""),
        record("update", "Bo is 4.", "Bo is 4."),
        record("retrieval", "Do I have a licence?", "True"),
        record("clarification", "How tall is Marta Lopez?", "unused"),
        *(
            record("retrieval", "Where?", "Bern") | {"context_messages": wrong}
            for wrong in (None, "text", [{}], ["text"])
        ),
        record("nonsense", "Where?", "Bern"),
        record("retrieval", "Where?", "Bern", "large"),
        record("retrieval", "Where?", "Bern", "nowhere"),
    ]
    (tmp_path / "large").mkdir()
    large = {"mem_id": "large", "user_md": "x" * 70_000, "entities": []}
    (tmp_path / "large" / "base_memory.json").write_text(json.dumps(large))
    keys = write(tmp_path, rows, entities=[entity("bo:b", "# Bo\n- **age**: 3\n")])
    table = task_table(MemoryRecipe.model_validate(keys))
    assert [row.task.kind for row in table.rows] == ["retrieval", "retrieval", "clarification"]
    assert (table.problems.used, table.problems.total, len(table.renamed)) == (3, 9, 1)
    # All rows are checked, although some cannot be used, and kinds are counted.
    assert main(["env", "validate", "memory", *(f"{key}={value}" for key, value in keys.items())]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 tasks" in shown
    assert "retrieval 2" in shown
    assert "clarification 1" in shown
    with judge(points(5)) as server:
        judged = keys | {"judge": server.keys(), "judge_decides": ["retrieval", "update"]}
        assert len(task_table(MemoryRecipe.model_validate(judged)).rows) == 5
        assert said(judged, 1, "<reply>He would.</reply>").info["success"] is True
        assert (
            said(judged, 1, "<python>append_file('user.md', 'x')</python>", "<reply>He would.</reply>").info["success"]
            is False
        )
        assert said(judged, 0, "<reply>Old enough.</reply>").info["success"] is True
    first, *_ = server.seen()
    assert list(first) == ["user", "notes", "changes", "reply"]
    assert list(server.seen()[-1]) == ["user", "reference", "changes", "reply"]


@pytest.mark.parametrize(("reply", "answer"), [
    ("Yes.", "yes"), ("Yes, you have a licence.", "yes"), ("You have a licence.", "yes"), ("That is true.", "yes"),
    ("No, you have none.", "no"), ("You do not have a licence.", "no"), ("You don't have one.", "no"),
    ("False", "no"), ("Yes. No.", None), ("Yes and no.", None), ("I looked.", None), ("", None), ("Nope.", "no"),
    ("Your notes say yes.", "yes"), ("The answer is no.", "no"), ("That is not true.", "no"), ("That's correct.", "yes"),
    ("I do not know.", None), ("I don't know whether you have a licence.", None), ("Maybe.", None),
    ("I'm not sure.", None), ("There is nothing about a licence.", None), ("I cannot find a licence.", None),
    ("The notes do not mention it.", None), ("No, I found none.", "no"), ("I have no record of a licence.", None),
])  # fmt: skip
def test_true_and_false_are_yes_and_no(reply, answer, tmp_path):
    question = "Do I have a licence?"
    assert states_truth(reply, question) == answer
    keys = write(tmp_path, [record("retrieval", question, "True"), record("retrieval", question, "False")])
    for seed, gold in enumerate(("yes", "no")):
        assert not reply or said(keys, seed, f"<reply>{reply}</reply>").info["success"] is (answer == gold)


def test_a_clarification_asks_for_what_the_notes_lack_and_not_by_repeating_the_question(tmp_path):
    asked = ["How tall is Marta Lopez?", "What is the blood type of Bo?"]
    keys = write(tmp_path, [record("clarification", one, "") for one in asked], entities=[entity("bo", "# Bo\n")])
    rights = ["I know no Marta Lopez. Who is that?", "My notes do not give the blood type. Which is it?"]
    for seed, right in enumerate(rights):
        assert said(keys, seed, f"<reply>{right}</reply>").info["success"] is True
        for wrong in (
            f"I do not know this: {asked[seed].rstrip('?')}. Can you tell me more?",
            "I do not know. Can you tell me more about Bo?",
            right.split(".")[0] + ".",
        ):
            assert said(keys, seed, f"<reply>{wrong}</reply>").info["success"] is False
    recipe = MemoryRecipe.model_validate(keys)
    Memory.validate(recipe, [0, 1])
    baselines = Memory.baselines(recipe, [0, 1])
    assert baselines["always asks"].success == 0.0


def evaluation(folder):
    """Two kinds of items in the layout of the authors, with a line that is empty and items that nothing can decide."""
    vaults = {
        "retrieval/1": {
            "user.md": "# Me\n- **home**: [[entities/old:town.md]]\n",
            "entities/old:town.md": "# Old town\n- **river**: Aare\n",
        },
        "update/7": {"user.md": "# Me\n- **city**: Lund\n"},
    }
    for place, files in vaults.items():
        for path, text in files.items():
            (folder / place / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / place / path).write_text(text)
    items = {
        "retrieval/1": [
            {"question": "Which river is in the old town?", "answer": "Aare", "judge": "names the river"},
            {"question": "Would I like to swim?", "answer": "", "judge": "says that there is a river"},
        ],
        "update/7": [
            {
                "update": "I live in Bern now.",
                "question": "In which city do I live?",
                "answer": "Bern",
                "judge": "Bern",
                "diff": ["user.md"],
            },
            {"update": "I like tea.", "judge": "tea is noted"},
        ],
    }
    for place, listed in items.items():
        lines = "\n\n".join(json.dumps(item) for item in listed)
        (folder / f"{place}_qa.jsonl").write_text(lines + "\n")
    return {"tasks": str(folder)}


def test_a_folder_of_evaluation_items_is_read_with_its_vaults(tmp_path):
    keys = evaluation(tmp_path / "eval")
    table = task_table(MemoryRecipe.model_validate(keys))
    assert [(row.task.kind, row.task.question) for row in table.rows] == [
        ("retrieval", "Which river is in the old town?"),
        ("update", "I live in Bern now."),
    ]
    assert (table.problems.total, len(table.renamed)) == (2, 1)
    assert table.rows[0].files["user.md"] == "# Me\n- **home**: [[entities/old-town.md]]\n"
    assert said(keys, 0, "<reply>The Aare.</reply>").info["success"] is True
    with judge(points(10)) as server:
        judged = keys | {"judge": server.keys(), "judge_decides": ["retrieval", "update"]}
        assert len(task_table(MemoryRecipe.model_validate(judged)).rows) == 4
        assert said(judged, 1, "<reply>There is a river to swim in.</reply>").info["success"] is True
        assert server.seen()[-1]["criteria"] == "says that there is a river"
    # Each other line, and each folder that is no vault, is counted, and the items after it are read.
    useful = json.dumps({"question": "Do I like tea?", "answer": False})
    (tmp_path / "eval" / "update" / "8_qa.jsonl").write_text(json.dumps({"update": "I like tea."}))
    (tmp_path / "eval" / "retrieval" / "1_qa.jsonl").write_text("\n".join(("{", "[1]", '{"answer": "x"}', useful)))
    table = task_table(MemoryRecipe.model_validate(keys | {"vault": {"depth": 5}}))
    assert [row.task.question for row in table.rows] == ["Do I like tea?", "I live in Bern now."]
    assert table.rows[0].task.truth["answers"][0]["value"] == "no"
    assert [int(line.split()[0]) for line in table.problems.summary()] == [2, 1, 1, 1]
    assert listed_rows(table.tasks, [0]).startswith("1 of `")


def test_the_question_after_an_update_decides_it(tmp_path):
    keys = evaluation(tmp_path / "eval")
    change = "<python>update_file('user.md', 'Lund', 'Bern')</python>"
    right = said(keys, 1, change, "<reply>Noted.</reply>", "<reply>In Bern.</reply>")
    assert right.info["success"] is True
    assert right.info["scores"] == {"update": 1.0, "update, notes": 1.0, "update, asked after": 1.0}
    wrong = said(keys, 1, change, "<reply>Noted.</reply>", "<reply>In Lund.</reply>")
    assert wrong.info["scores"] == {"update": 0.0, "update, notes": 1.0, "update, asked after": 0.0}
    nothing = said(keys, 1, "<reply>Noted.</reply>", "<reply>In Bern.</reply>")
    assert nothing.info["scores"] == {"update": 0.0, "update, notes": 0.0, "update, asked after": 1.0}


def test_records_are_read_with_the_vaults_that_they_name(tmp_path):
    write(tmp_path, [], "# Me\n", [entity("bo", "- age: 3\n")])
    memories = read_memories(tmp_path).vaults
    vault = {"user.md": "# Me\n", "entities/bo.md": "- age: 3\n"}
    assert memories == {"m1": vault}

    def read(*row, decided=frozenset()):
        return read_published_row(record(*row), memories, decided)[0]

    def scored(task, reply):
        return score(task, vault, vault, reply, asks(reply), 2, RewardWeights())

    born = read("retrieval", "Born when?", "May 3, 2024")
    assert [scored(born, reply).success for reply in ("On 2024-05-03.", "On 2024-05-04.")] == [True, False]
    assert scored(read("retrieval", "Job?", "software engineer"), "A Software Engineer.").success
    doubt = read("clarification", "How tall is Marta?", "unused")
    assert [scored(doubt, reply).success for reply in ("I know no Marta. Who is that?", "Marta is tall.")] == [
        True,
        False,
    ]
    # A recorded reply is right in any form, and short words of a question are what it is about.
    for gold in ("I cannot find it.", "Marta is not in the notes", "Say more.", "31 and 33 are both given: which?"):
        known = read("clarification", "Who is Bo?", gold)
        assert scored(known, gold).success
        assert scored(known, "Which Bo do you mean?").success
        assert scored(known, "Who do you mean?").faults == ("it did not say what is missing (bo)",)
    for gold in ("He has no car.", "True", "Bern, not Basel", "12 May 2020 or so"):
        assert scored(read("retrieval", "What?", gold), gold).success
    filtered = read("retrieval", "How many?", "<filter>No names.</filter>\n<answer>12</answer>")
    told = (filtered.kind, filtered.question, filtered.reply)
    assert told == ("filter", "How many?\nPrivacy rule: No names.", "12")
    with pytest.raises(InputError, match=r"environment\.judge"):
        read("update", "Note it", "Note it")
    with pytest.raises(InputError):
        scored(read("update", "Note it", "Note it", decided=frozenset({"update"})), "ok")
    assert is_published_row(record("update", "a", "b"))
    assert not is_published_row({"label": "{}"})
    (tmp_path / "m1" / "base_memory.json").write_text("[]")
    with pytest.raises(InputError, match="base_memory"):
        read_memories(tmp_path)
