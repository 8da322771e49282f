"""Training rows from documents: samples answers, scores them, and writes the best and the worst as pairs.

Answers are stored in a generate run and replies of a judge in a cache, so a repeated call continues where the last one
stopped.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.data.documents import (
    Document,
    Sampled,
    has_all_answers,
    holds_prompts,
    read_documents,
    split_documents,
    write_documents,
    write_prompts,
)
from posttrain.environments.judge import check_judge
from posttrain.errors import InputError, RunError
from posttrain.evaluation.judges import Options, Progress, judge_predictions, load_rubric
from posttrain.evaluation.model_metrics import Rewards, rewards_of
from posttrain.evaluation.predictions import Prediction, Predictions, read_predictions
from posttrain.evaluation.workers import ModelWorkers
from posttrain.models.load import require_reward_model
from posttrain.recipe.compose import section
from posttrain.recipe.judge import JudgeServerRecipe
from posttrain.recipe.sources import merge, read_overrides
from posttrain.recipe.stages import GenerateRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.verbs import generate, read_recipe

JudgeProgress = Callable[[], AbstractContextManager[Progress]]
_OURS = ("data", "runs", "name", "out")
"""Keys of the generate run that are determined by the documents."""


@dataclass(frozen=True)
class Scorer:
    """Selects among sampled answers: a reward model, or a judge with a rubric."""

    reward: str | None = None
    rubric: str | None = None
    judge: Sequence[str] = ()
    """Keys of `JudgeServerRecipe`, such as `url=URL`."""
    workers: int = 8
    """Concurrent requests to the judge."""


@dataclass(frozen=True)
class DocumentRows:
    """The written files with their numbers of rows, and messages on unused answers."""

    files: dict[Path, int]
    messages: list[str]


def document_rows(
    folder: Path,
    template: Path,
    out: Path,
    name: str = "rationales",
    answers: Path | None = None,
    val: float = 0.1,
    test: float = 0.1,
    keys: Sequence[str] = (),
    scorer: Scorer | None = None,
    progress: JudgeProgress = lambda: nullcontext(lambda *_: None),
) -> DocumentRows:
    """Write prompts, conversations and pairs of the documents in `folder` under `out`.

    Args:
        folder, template, answers: as for `read_documents`.
        name: first word of the file names.
        val, test: numbers (int) or shares (float) of documents.
        keys: overrides of a generate recipe, which samples answers; if empty, only written answers are used.
        scorer: chooses the best and the worst sampled answer of each document.
        progress: creates the context manager around the requests to a judge; it yields the callback of `ask_all`.

    Raises:
        InputError: wrong input, or keys that differ from those of answers that already exist.
        RunError: a server failed; a repeated call continues.
    """
    documents = read_documents(folder, template, answers)
    splits = split_documents(documents, val, test)
    sampled: dict[str, Sampled] = {}
    messages: list[str] = []
    if keys:
        place = out / "sampled"
        score = None if scorer is None else _scores(scorer, place, progress)
        predictions = _sampled_answers(documents, keys, place, scorer is not None)
        scores = None if score is None else score(predictions)
        sampled, unused = best_of(predictions.rows, scores)
        messages = [f"{count} sampled answers not used: {reason}" for reason, count in unused.items()]
        if alike := sum(not one.differs for one in sampled.values()) if scorer is not None else 0:
            messages.append(f"{alike} documents without a pair: all their answers have the same score")
    elif scorer is not None:
        raise InputError(
            "--reward and --rubric score sampled answers; add the model that samples them, as in model.path=MODEL"
        )
    files = write_documents(out, name, documents, splits, sampled)
    present = {path.stem.removeprefix(f"{name}_") for path in files}
    for kind, what in (("sft", "an answer"), ("preference", "two answers with different scores")):
        messages += [
            f"no {kind} rows for {split}: none of its {list(splits.values()).count(split)} documents has {what}; add answers, or "
            f"raise --{split}"
            for split in ("val", "test")
            if split in splits.values() and f"{kind}_train" in present and f"{kind}_{split}" not in present
        ]
    return DocumentRows(files, messages)


def best_of(
    rows: Sequence[Prediction], scores: Sequence[float | None] | None
) -> tuple[dict[str, Sampled], dict[str, int]]:
    """Item -> its best and worst answer by score, the earlier one among equals; and the number of unused answers by reason.

    Answers that were cut off, are empty, or have no score are not used. Without `scores`, the first usable answer of an
    item is both best and worst.
    """
    extremes: dict[str, Sampled] = {}
    unused: dict[str, int] = {}
    for place, row in enumerate(rows):
        score = None if scores is None else scores[place]
        reason = "cut off" if row.cut_off else "empty" if not row.text.strip() else None
        if reason is None and scores is not None and score is None:
            reason = "without a score"
        if reason is not None:
            unused[reason] = unused.get(reason, 0) + 1
            continue
        one = extremes.setdefault(row.item, Sampled(row.text, score, row.text, score))
        if score is not None and one.best_score is not None and one.worst_score is not None:
            if score > one.best_score:
                extremes[row.item] = Sampled(row.text, score, one.worst, one.worst_score)
            elif score < one.worst_score:
                extremes[row.item] = Sampled(one.best, one.best_score, row.text, score)
    return extremes, unused


def _sampled_answers(documents: Sequence[Document], keys: Sequence[str], place: Path, scored: bool) -> Predictions:
    """The answers of the generate run in `place`, which is started or continued if answers are missing."""
    layers = read_overrides(list(keys))
    if ours := next((key for layer in layers for key in layer.values if key in _OURS), None):
        raise InputError(f"{ours} of the sampled answers is determined by the documents; remove it")
    prompts, run, answers = place / "documents.jsonl", place / "answers", place / "answers.jsonl"
    given: dict[str, Any] = {
        "data": {"test": str(prompts), "id": "document"},
        "runs": str(place),
        "name": run.name,
        "out": str(answers),
    }
    recipe = read_recipe("generate", *layers, **given)
    assert isinstance(recipe, GenerateRecipe)
    if scored and recipe.samples < 2:
        raise InputError("a pair needs two answers; set samples to 2 or more, and a sampling.temperature")
    if not scored and recipe.samples > 1:
        raise InputError(
            f"samples = {recipe.samples}, and no scorer selects one; add --reward or --rubric, or set samples=1"
        )
    begun = (run / "recipe.yaml").is_file()
    if begun:
        known = RunDirectory.open(run).load_recipe().model_dump(mode="json")
        changed = [key for key, value in recipe.model_dump(mode="json").items() if known.get(key) != value]
        if changed:
            raise InputError(
                f"{place} has answers that were sampled with another {', '.join(changed)}; undo the change, or choose "
                "another --out"
            )
        if not holds_prompts(prompts, documents):
            raise InputError(
                f"{prompts} has other documents or another template, whose answers are in {answers}; undo the change, or choose "
                "another --out"
            )
    try:
        if not begun:
            write_prompts(prompts, documents)
            generate(*layers, **given)
        elif not has_all_answers(answers, documents, recipe.samples):
            generate(resume=run)
    except RunError as error:
        # Following the advice of `generate` would sample the answers but skip the remaining work.
        advice = f"continue with `posttrain generate --resume {run}`"
        raise RunError(str(error).replace(advice, "run the same command again to continue")) from error
    return read_predictions(str(answers))


def _scores(scorer: Scorer, place: Path, progress: JudgeProgress) -> Callable[[Predictions], list[float | None]]:
    """The function that scores answers. Wrong settings are an `InputError` before answers are sampled."""
    if scorer.reward is not None:
        require_reward_model(scorer.reward, "--reward")
        return partial(_rewards, scorer.reward)
    assert scorer.rubric is not None
    values = {"cache": str(place / "judge-cache.jsonl"), **merge(read_overrides(list(scorer.judge))).values}
    options = Options(load_rubric(scorer.rubric), section(JudgeServerRecipe, **values), scorer.workers)
    check_judge(options.server)
    return partial(_judged, options, progress)


def _rewards(path: str, predictions: Predictions) -> list[float | None]:
    from posttrain.training.reward_scorer import AnswerRewards

    load: Callable[[], Rewards] = partial(AnswerRewards, path)
    with ModelWorkers(load) as model:
        return rewards_of(predictions.rows, model)[0]


def _judged(options: Options, progress: JudgeProgress, predictions: Predictions) -> list[float | None]:
    with progress() as report:
        judgement = judge_predictions(predictions, options, report)
    if judgement.unanswered:
        raise RunError(
            f"the judge did not answer for {judgement.unanswered:,} of {len(judgement.records):,} answers; run the same "
            f"command again to ask for these only (replies are in {options.server.cache})"
        )
    if not judgement.results.metrics:
        raise RunError(f"no answer has a score: {judgement.warnings[0]}; use another judge or rubric")
    return [record["score"] for record in judgement.records]
