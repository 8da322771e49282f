"""Right and wrong behaviors of models and their rewards: shows that no wrong behavior earns more than a right one."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.seeds import random_stream
from posttrain_memory.vault.paths import USER
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.tools import tools
from posttrain_memory.vault.vault import Vault
from posttrain_memory.worlds.asking import display
from posttrain_memory.worlds.changes import expected
from posttrain_memory.worlds.graph import ValueSampler
from posttrain_memory.worlds.naming import matcher
from posttrain_memory.worlds.recipe import RewardWeights
from posttrain_memory.worlds.replies import Answer, answer
from posttrain_memory.worlds.rewards import Scored, score
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import themes
from posttrain_memory.worlds.truth import Parsed, parse
from posttrain_memory.worlds.values import canonical, mentions, plain

_MANY = 60
"""Number of turns of an episode that reads everything."""


@dataclass(frozen=True)
class Scenario:
    """A possible episode of a task, and whether it is right."""

    name: str
    right: bool
    after: dict[str, str]
    reply: str | None
    asked: bool = False
    turns: int = 3
    checked_first: bool = False


def apply_solution(task: MemoryTask, files: Mapping[str, str]) -> dict[str, str]:
    """The vault after the code of the scripted solution. Only its writing calls are evaluated; no code is run."""
    vault = Vault(MemoryStorage(dict(files)))
    functions = tools(vault)
    for code in task.code:
        for step in ast.parse(code).body:
            call = step.value if isinstance(step, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                functions[call.func.id](*(ast.literal_eval(argument) for argument in call.args))
    return vault.files()


def scenarios(task: MemoryTask, files: Mapping[str, str]) -> list[Scenario]:
    """Right and wrong episodes of a task in the vault `files`."""
    before, after = dict(files), apply_solution(task, files)
    everything = "\n\n".join(before.values())
    episodes = [
        Scenario("right", True, after, task.reply, task.asks, len(task.solution)),
        Scenario("right, after many turns", True, after, task.reply, task.asks, _MANY),
        Scenario("right, user.md first", True, after, task.reply, task.asks, len(task.solution), True),
        Scenario("no reply", False, after, None, False, _MANY, True),
        Scenario(
            "right, and changed another note", False, _with_extra_lines(before, after), task.reply, task.asks, 2, True
        ),
        Scenario("right, and broke a link", False, _with_broken_link(after), task.reply, task.asks, 2, True),
    ]
    if task.kind == "update":
        return episodes + _update(task, before, after)
    episodes += [
        Scenario("all notes as the reply", False, before, everything, False, 3, True),
        Scenario("all notes as a question", False, before, f"{everything}\nWhich of this?", True, 3, True),
        Scenario("empty words", False, before, "I had a look at that.", False, 2, True),
        Scenario("emptied the notes", False, {USER: "# Notes\n"}, task.reply, task.asks, 2, True),
    ]
    vault = parse(files, task.theme)
    if task.asks:
        truth = task.truth
        value = _wrong_value(Answer(truth["type"], (truth["values"] or [""])[0], truth["key"]), task, ())
        episodes += [
            Scenario("asked about nothing", False, before, "What do you mean?", True, 1, True),
            Scenario(
                "echoed the question and asked", False, before, f"{task.question} Could you tell me?", True, 1, True
            ),
            Scenario("said it is missing, did not ask", False, before, task.reply.split(". ")[0] + ".", False, 2, True),
        ]
        values = [("answered what is not there", value), *(("took a side", _plainly(side)) for side in truth["values"])]
        for name, fake in values:
            if fake:
                episodes.append(Scenario(name, False, before, f"It is {fake}.", False, 1, True))
                episodes.append(
                    Scenario(f"{name}, and asked", False, before, f"{task.reply} I take {fake}.", True, 1, True)
                )
        return episodes
    episodes += [
        Scenario("asked though it could answer", False, before, "What do you mean by that?", True, 1, True),
        Scenario("right, and asked", False, before, f"{task.reply} Is that right?", True, 3, True),
    ]
    wanted = [answer(record) for record in task.truth["answers"]]
    if wanted:
        names = [*task.truth.get("against", ()), *_names(vault, wanted, task.question)]
        wrong = [_wrong_value(one, task, names) for one in wanted]
        episodes += [
            Scenario("wrong value", False, before, f"It is {wrong[0] or 'unknown'}.", False, 1, True),
            Scenario("said that it is not so", False, before, f"It is not {_shown_value(wanted[0])}.", False, 3, True),
            Scenario("refused", False, before, "I may not share that, it is private.", False, 1, True),
        ]
        if wrong[0]:
            text = f"{task.reply} Or else {wrong[0]}."
            episodes.append(Scenario("right and wrong value", False, before, text, False, 3, True))
    if task.truth.get("hidden"):
        secret = " ".join(f"It is {_shown_value(answer(record))}." for record in task.truth["hidden"])
        episodes.append(Scenario("said what is private", False, before, f"{task.reply} {secret}", False, 3, True))
        episodes.append(Scenario("said only what is private", False, before, secret, False, 3, True))
    return episodes


def scenario_scores(
    tasks: Iterable[tuple[MemoryTask, Mapping[str, str]]], weights: RewardWeights
) -> dict[tuple[str, bool, str], list[Scored]]:
    """(kind, right, scenario name) -> scores, over tasks with their vaults, in order.

    If a judge counts, the worst possible judge is assumed: score 0 for right episodes, 1 for wrong ones.
    """
    scores_of: dict[tuple[str, bool, str], list[Scored]] = {}
    for task, files in tasks:
        for one in scenarios(task, files):
            judged = float(not one.right) if weights.judge else None
            scored = score(task, files, one.after, one.reply, one.asked, one.turns, weights, one.checked_first, judged)
            scores_of.setdefault((task.kind, one.right, one.name), []).append(scored)
    return scores_of


def _update(task: MemoryTask, before: dict[str, str], after: dict[str, str]) -> list[Scenario]:
    change = task.truth["change"]
    want = expected(change, parse(before, task.theme), parse(after, task.theme))
    episodes = [
        Scenario("did nothing", False, before, task.reply, False, 1, True),
        Scenario("asked instead", False, before, "Are you sure?", True, 1, True),
        Scenario("done, and asked", False, after, "Done. Is that right?", True, 3, True),
        Scenario("done, and denied", False, after, "I refuse to do that; I changed nothing.", False, 3, True),
        Scenario(
            "done, and recited all notes",
            False,
            after,
            _without_question_marks("\n\n".join(before.values())),
            False,
            3,
            True,
        ),
        Scenario(
            "pasted the message into user.md", False, _with(before, USER, f"\n{task.question}\n"), task.reply, turns=2
        ),
        Scenario("emptied the notes", False, {USER: "# Notes\n"}, task.reply, False, 1, True),
    ]
    written = [path for path, text in after.items() if before.get(path) != text]
    # The right text in the wrong note.
    apart = next((p for p in sorted(before) if p not in want.touched | want.gone and p not in written), None)
    lines = [line for p in written for line in after[p].split("\n") if line not in before.get(p, "").split("\n")]
    if apart and lines and change["op"] != "remove":
        episodes.append(
            Scenario("in the wrong note", False, _with(before, apart, "\n".join(lines) + "\n"), task.reply, turns=2)
        )
    if change["op"] == "set":
        wrong = after | {p: _with_wrong_endings(after[p], before.get(p, "")) for p in written}
        episodes.append(Scenario("wrong value written", False, wrong, task.reply, False, 2, True))
        path = change["about"]
        title = before[path].split("\n# ")[-1].lstrip("# ").split("\n")[0]
        only = f"# {title}\n\n" + "\n".join(lines) + "\n"
        episodes.append(
            Scenario("note rewritten with this alone", False, {**after, path: only}, task.reply, False, 2, True)
        )
        if task.variant == "change":
            both = _with(before, path, "\n".join(lines) + "\n")
            episodes.append(Scenario("old value kept beside", False, both, task.reply, False, 2, True))
    if change["op"] == "new" and want.new:
        alone = {**before, want.new: after[want.new]}
        episodes.append(Scenario("new note without a link to it", False, alone, task.reply, False, 2, True))
    if change["op"] == "remove":
        gone = {path: text for path, text in before.items() if path != change["about"]}
        episodes.append(Scenario("links to the note left", False, gone, task.reply, False, 2, True))
    return episodes


def _without_question_marks(text: str) -> str:
    return text.replace("?", ".")


def _with(files: Mapping[str, str], path: str, text: str) -> dict[str, str]:
    return {**files, path: files[path] + text}


def _with_extra_lines(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Additional lines in a note that the solution does not touch."""
    path = next(path for path in sorted(after, reverse=True) if after[path] == before.get(path))
    return _with(after, path, "\nThis line has nothing to do with it. " * 12)


def _with_broken_link(files: Mapping[str, str]) -> dict[str, str]:
    path = next(path for path, text in files.items() if "[[entities/" in text)
    return {**files, path: files[path].replace("[[entities/", "[[nowhere/", 1)}


def _with_wrong_endings(text: str, before: str) -> str:
    """The text with the last character of each new line changed."""
    known = before.split("\n")
    return "\n".join(line if line in known else f"{line.rstrip('. |')}7zz" for line in text.split("\n"))


def _shown_value(one: Answer) -> str:
    return _plainly(one.value)


def _plainly(value: str) -> str:
    return value.replace("; ", ", ")


def _names(vault: Parsed, wanted: Sequence[Answer], question: str) -> list[str]:
    known = {one.value for one in wanted}
    names = sorted(title for title in vault.titles.values() if title)
    return [name for name in names if plain(name) not in known and not mentions(plain(question), plain(name))]


def _wrong_value(one: Answer, task: MemoryTask, names: Sequence[str]) -> str | None:
    """A value of the type that is neither the answer nor in the question. None if it could be confused with them."""
    if one.type == "name":
        return names[0] if names else None
    declared = themes()[task.theme].declared(one.key)
    if not declared:
        return f"{int(one.value) + 7}"
    if one.type == "text" and matcher(declared[0].values) is None:
        return None
    sampler = ValueSampler(random_stream("memory scenario", task.question))
    taken = set(one.value.split("; "))
    for _ in range(100):
        value = sampler.value(declared[0])
        if taken.isdisjoint((canonical(one.type, value) or "").split("; ")) and value not in task.question:
            return display(declared[0], value)
    return None
