"""Many questions to a judge at once. What it replied is kept by its cache; what it did not, is told and never scored."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from posttrain.environments.judge import JudgeFailure, ask_judge
from posttrain.environments.judge_replies import Judged
from posttrain.evaluation.rubrics import Question
from posttrain.recipe.judge import JudgeServerRecipe

UNREADABLE, SILENT, NOT_ASKED = "unreadable reply", "no answer of the server", "not asked"
"""Why there is no score."""
_AT_LEAST = 3


@dataclass(frozen=True)
class Reply:
    """What became of a question."""

    judged: Judged | None
    kind: str = ""
    """UNREADABLE, SILENT or NOT_ASKED where the judge said nothing that counts."""
    failure: str = ""
    """One sentence on it."""


Progress = Callable[[int, int, int], None]
"""Told the number of questions that are done, of all, and of those without a verdict."""


def ask_all(
    server: JudgeServerRecipe, questions: Sequence[Question], workers: int, progress: Progress = lambda *_: None
) -> list[Reply]:
    """A reply to each question, in their order; `workers` requests are under way at a time.

    A server that fails again and again (for as many questions in a row as there are workers where it never answered,
    for twice as many later) is asked no more; what was under way then is not waited for.
    """
    replies = [Reply(None, NOT_ASKED, "the server failed again and again before its turn came") for _ in questions]
    places, lock, stop = iter(range(len(questions))), threading.Lock(), threading.Event()
    done: SimpleQueue[tuple[int, Reply | BaseException]] = SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            with lock:
                place = next(places, None)
            if place is None:
                return
            try:
                done.put((place, _ask(server, questions[place])))
            except BaseException as error:
                done.put((place, error))
                return

    # Daemons, so that an interrupted command ends at once; the cache takes a death at any instant.
    for _ in range(min(workers, len(questions))):
        threading.Thread(target=work, daemon=True).start()
    failed = in_a_row = 0
    answered = False
    try:
        for count in range(1, len(questions) + 1):
            place, reply = done.get()
            if isinstance(reply, BaseException):
                raise reply
            replies[place] = reply
            failed += reply.judged is None
            in_a_row = in_a_row + 1 if reply.kind == SILENT else 0
            answered = answered or reply.kind != SILENT
            progress(count, len(questions), failed)
            if in_a_row >= max(_AT_LEAST, workers) * (2 if answered else 1):
                break
    finally:
        stop.set()
    return replies


def _ask(server: JudgeServerRecipe, question: Question) -> Reply:
    try:
        return Reply(ask_judge(server, question.prompt, question.form))
    except JudgeFailure as error:
        return Reply(None, UNREADABLE if error.unreadable else SILENT, str(error))
