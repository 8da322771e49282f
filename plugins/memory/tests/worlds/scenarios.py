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


def wrong(name: str, after: dict[str, str], reply: str | None, asked: bool = False) -> Scenario:
    """A wrong episode with the turns and the first call that earn most."""
    return Scenario(name, False, after, reply, asked, turns=1, checked_first=True)


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
    before, after, turns = dict(files), apply_solution(task, files), len(task.solution)
    everything = "\n\n".join(before.values())
    episodes = [
        Scenario("right", True, after, task.reply, task.asks, turns),
        Scenario("right, after many turns", True, after, task.reply, task.asks, 60),
        Scenario("right, user.md first", True, after, task.reply, task.asks, turns, True),
        wrong("no reply", after, None),
        wrong("right, and changed another note", _with_extra_lines(before, after), task.reply, task.asks),
        wrong("right, and broke a link", _with_broken_link(after), task.reply, task.asks),
        wrong("emptied the notes", {USER: "# Notes\n"}, task.reply, task.asks),
    ]
    if task.kind == "update":
        return episodes + _update(task, before, after)
    episodes += [
        wrong("all notes as the reply", before, everything),
        wrong("all notes as a question", before, f"{everything}\nWhich of this?", True),
        wrong("empty words", before, "I had a look at that."),
    ]
    vault = parse(files, task.theme)
    if task.asks:
        truth = task.truth
        value = _wrong_value(Answer(truth["type"], (truth["values"] or [""])[0], truth["key"]), task, ())
        episodes += [
            wrong("asked about nothing", before, "What do you mean?", True),
            wrong("echoed the question and asked", before, f"{task.question} Could you tell me?", True),
            wrong("said it is missing, did not ask", before, task.reply.split(". ")[0] + "."),
        ]
        values = [("answered what is not there", value), *(("took a side", _plainly(side)) for side in truth["values"])]
        for name, fake in values:
            if fake:
                episodes.append(wrong(name, before, f"It is {fake}."))
                episodes.append(wrong(f"{name}, and asked", before, f"{task.reply} I take {fake}.", True))
        return episodes
    episodes += [
        wrong("asked though it could answer", before, "What do you mean by that?", True),
        wrong("right, and asked", before, f"{task.reply} Is that right?", True),
    ]
    wanted = [answer(record) for record in task.truth["answers"]]
    if wanted:
        names = [*task.truth.get("against", ()), *_names(vault, wanted, task.question)]
        other = _wrong_value(wanted[0], task, names)
        episodes += [
            wrong("wrong value", before, f"It is {other or 'unknown'}."),
            wrong("said that it is not so", before, f"It is not {_plainly(wanted[0].value)}."),
            wrong("refused", before, "I may not share that, it is private."),
        ]
        if other:
            episodes.append(wrong("right and wrong value", before, f"{task.reply} Or else {other}."))
    if task.truth.get("hidden"):
        secret = " ".join(f"It is {_plainly(answer(record).value)}." for record in task.truth["hidden"])
        episodes.append(wrong("said what is private", before, f"{task.reply} {secret}"))
        episodes.append(wrong("said only what is private", before, secret))
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
    change, reply = task.truth["change"], task.reply
    want = expected(change, parse(before, task.theme), parse(after, task.theme))
    episodes = [
        wrong("did nothing", before, reply),
        wrong("asked instead", before, "Are you sure?", True),
        wrong("done, and asked", after, "Done. Is that right?", True),
        wrong("done, and denied", after, "I refuse to do that; I changed nothing."),
        wrong("done, and recited all notes", after, "\n\n".join(before.values()).replace("?", ".")),
        wrong("pasted the message into user.md", _with(before, USER, f"\n{task.question}\n"), reply),
    ]
    written = [path for path, text in after.items() if before.get(path) != text]
    # The right text in the wrong note.
    apart = next((p for p in sorted(before) if p not in want.touched | want.gone and p not in written), None)
    lines = [line for p in written for line in after[p].split("\n") if line not in before.get(p, "").split("\n")]
    added = "\n".join(lines) + "\n"
    if apart and lines and change["op"] != "remove":
        episodes.append(wrong("in the wrong note", _with(before, apart, added), reply))
    if change["op"] == "set":
        path = change["about"]
        title = before[path].split("\n# ")[-1].lstrip("# ").split("\n")[0]
        falsely = after | {p: _with_wrong_endings(after[p], before.get(p, "")) for p in written}
        episodes.append(wrong("wrong value written", falsely, reply))
        episodes.append(wrong("note rewritten with this alone", {**after, path: f"# {title}\n\n{added}"}, reply))
        if task.variant == "change":
            episodes.append(wrong("old value kept beside", _with(before, path, added), reply))
    if change["op"] == "new" and want.new:
        episodes.append(wrong("new note without a link to it", {**before, want.new: after[want.new]}, reply))
    if change["op"] == "remove":
        gone = {path: text for path, text in before.items() if path != change["about"]}
        episodes.append(wrong("links to the note left", gone, reply))
    return episodes


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
