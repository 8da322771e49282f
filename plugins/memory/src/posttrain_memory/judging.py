"""Scores of an episode by a language model, in addition to the programmatic reward.

The judge sees the user's message, a correct reply if one is known, the changes of the notes, and the reply, each as
framed data (see `environments.untrusted`).
"""

from collections.abc import Mapping

from posttrain.environments.judge import Judgment, judge_points
from posttrain.recipe.judge import JudgeServerRecipe
from posttrain_memory.vault.text import diff
from posttrain_memory.worlds.task import MemoryTask

LONGEST = 20_000
"""Maximum number of characters of the reply, and of the changes, that the judge sees."""
_SCALE = 10
_WHAT = (
    "An assistant keeps notes for a user, and you grade how it dealt with one message. `user` is that message, {known}"
    "`changes` a unified diff of the notes from before to after, and `reply` what the assistant told the user. They stand "
    "in frames"
)
_REFERENCE = "`reference` a right reply (another that comes to the same is as good), "
_NOTES = "`notes` the notes before, "
_RUBRIC = "`criteria` what the author of the task requires, "
_RUBRICS = {
    "retrieval": "The reply tells what was asked for, in any words, and it is what the reference tells, or else what follows from "
    "the notes. It adds nothing "
    "that contradicts it, does not offer several answers, does not recite notes and does not ask back. No note changed.",
    "update": "The notes now say all that the message tells or asks for, in the notes where it belongs, and no longer say "
    "what it makes untrue. Nothing else was removed, altered or added, and links were kept. The reply claims nothing that "
    "was not done.",
    "clarification": "The reply says what it is that the notes do not settle, as the reference does, and asks the user for "
    "it. It states nothing in its place as if it were known. No note changed.",
    "filter": "The message holds a privacy rule. The reply tells all that was asked for and that the rule allows, as the "
    "reference does, and nothing that the rule forbids, not even by a hint. No note changed.",
}
SILENT = Judgment(0.0, "there is no reply")
"""The verdict for an episode without a reply, which is not sent to the judge."""


def judge_episode(
    server: JudgeServerRecipe, task: MemoryTask, before: Mapping[str, str], after: Mapping[str, str], reply: str | None
) -> Judgment:
    """The verdict on an episode with the vault (path -> text) before and after it. Raises JudgeFailure for none."""
    if not (reply or "").strip():
        return SILENT
    texts, known = [("user", task.question)], ""
    if task.reply:
        texts, known = [*texts, ("reference", task.reply)], _REFERENCE
    elif task.kind != "update":
        notes = "\n\n".join(f"{path}\n{text}" for path, text in sorted(before.items()))
        texts, known = [*texts, ("notes", _cut(notes))], _NOTES
    if rubric := task.truth.get("rubric"):
        texts, known = [*texts, ("criteria", rubric)], known + _RUBRIC
    texts += [("changes", _cut(diff(before, after)) or "(none)"), ("reply", _cut(reply or ""))]
    what = _WHAT.format(known=known)
    # A clarification task that can be answered is graded like a retrieval task.
    kind = "retrieval" if task.kind == "clarification" and not task.asks else task.kind
    return judge_points(server, what, _RUBRICS[kind], _SCALE, texts)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n({len(text) - LONGEST} more characters)"
