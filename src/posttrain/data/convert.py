"""Published data sets as rows that the stages read: a table of converters by name.

Whatever a converter makes is checked as the stages will check it, so a converted file holds usable rows only.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.data.examples import ROW_FUNCTIONS, Kind
from posttrain.data.files import require_format, write_rows
from posttrain.data.messages import Prompt, Unusable, as_messages
from posttrain.data.problems import Problems
from posttrain.data.readers import read_rows
from posttrain.errors import InputError
from posttrain.recipe.data import ColumnsRecipe, SourceRecipe
from posttrain.seeds import random_stream

ANY = "any"
"""The language that keeps every row."""
SAMPLE = 200
"""Rows whose sign is checked."""
ENOUGH = 10
"""Sampled rows from which a majority of contrary signs stops the conversion."""
_WORDS = re.compile(r"response\s*([12])\s+is\s+(?:the\s+|much\s+|far\s+|slightly\s+|somewhat\s+)?better", re.IGNORECASE)
"""An annotator naming the better response."""


def helpsteer3_prompts(row: dict[str, Any], language: str = "english") -> dict[str, Any] | str:
    """What is to be answered, whatever the preference, or why the row is left out."""
    if _speaks_otherwise(row, language):
        return f"language is not {language}"
    prompt = {"context_messages": row.get("context")}
    return {**prompt, "domain": row["domain"]} if row.get("domain") is not None else prompt


def _speaks_otherwise(row: dict[str, Any], language: str) -> bool:
    spoken = row.get("language")
    return language != ANY and not (isinstance(spoken, str) and spoken.lower() == language.lower())


def helpsteer3(row: dict[str, Any], language: str = "english") -> dict[str, Any] | str:
    """A preference pair, or why the row gives none.

    `overall_preference` goes from -3 (response 1 is much better) to 3 (response 2 is much better), by the data set's
    card; 0 says that they are about the same. The margin is its size.
    """
    if _speaks_otherwise(row, language):
        return f"language is not {language}"
    preference: Any = row.get("overall_preference")
    if isinstance(preference, bool) or preference not in range(-3, 4):
        return "overall_preference is not a whole number from -3 to 3"
    if preference == 0:
        return "neutral preference"
    context = row.get("context")
    answers = [{"role": "assistant", "content": row.get(name)} for name in ("response1", "response2")]
    if not isinstance(context, list):
        return "context is not a list of messages"
    chosen, rejected = answers if preference < 0 else answers[::-1]
    pair = {"chosen": [*context, chosen], "rejected": [*context, rejected], "margin": float(abs(preference))}
    return {**pair, "domain": row["domain"]} if row.get("domain") is not None else pair


def gsm8k(row: dict[str, Any]) -> dict[str, Any] | str:
    """A question and its worked answer as a prompt and a completion."""
    return {"prompt": row.get("question"), "completion": row.get("answer")}


def ultrafeedback_binarized(row: dict[str, Any]) -> dict[str, Any] | str:
    """A preference pair with the difference of the two scores as its margin, or why the row gives none."""
    scores: list[Any] = [row.get("score_chosen"), row.get("score_rejected")]
    if not all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
        return "a score is not a number"
    try:
        margin = float(scores[0]) - float(scores[1])
    except OverflowError:
        return "a score is not a number"
    if margin == 0:
        return "equal scores"
    if not margin > 0:
        return "chosen has the lower score"
    pair = {"chosen": row.get("chosen"), "rejected": row.get("rejected"), "margin": margin}
    # Both sides are usually whole conversations, and then the prompt is said in them already.
    whole = isinstance(pair["chosen"], list) and pair["chosen"][:1] != [] and _role(pair["chosen"][0]) != "assistant"
    return pair if whole else {"prompt": row.get("prompt"), **pair}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


@dataclass(frozen=True)
class SignCheck:
    """Whether a sample of rows says in two ways which answer is better, and whether the ways agree."""

    scored: int
    """Sampled rows with scores of single annotators whose mean is not 0."""
    scores_agree: int
    """Of those: the mean has the sign of the overall preference."""
    worded: int
    """Sampled rows whose annotators write which response is better, most of them the same one."""
    words_agree: int
    """Of those: the response they name is the one that was chosen."""
    examples: list[str]
    """A row that chooses response 1 and one that chooses response 2, with an annotator's reasoning."""

    @property
    def inverted(self) -> bool:
        """Whether most of enough rows contradict the conversion."""
        counts = ((self.scored, self.scores_agree), (self.worded, self.words_agree))
        return any(count >= ENOUGH and 2 * agreeing < count for count, agreeing in counts)

    def lines(self) -> list[str]:
        """What was found, for people."""
        return [
            f"sign check: the annotators' mean score has the sign of the overall preference in {self.scores_agree} of "
            f"{self.scored} sampled rows; where they write which response is better, it is the chosen one in "
            f"{self.words_agree} of {self.worded}",
            *self.examples,
        ]


def check_sign(rows: Iterable[dict[str, Any]]) -> SignCheck:
    """Compare what `helpsteer3` makes of the rows with the annotators' scores and with their own words.

    Scores tell whether the rows contradict themselves. Only the words tell whether negative means response 1, for an
    inverted reading of the sign inverts scores and preferences alike.
    """
    scored = scores_agree = worded = words_agree = 0
    examples: dict[int, str] = {}
    for row in rows:
        pair = helpsteer3(row, ANY)
        if isinstance(pair, str):
            continue
        taken = 1 if pair["chosen"][-1]["content"] == row.get("response1") else 2
        opinions = row.get("individual_preference")
        opinions = [one for one in opinions if isinstance(one, dict)] if isinstance(opinions, list) else []
        scores = [s for one in opinions if isinstance(s := one.get("score"), int | float) and -3 <= s <= 3]
        reasons = [one["reasoning"] for one in opinions if isinstance(one.get("reasoning"), str)]
        if sum(scores):
            scored += 1
            scores_agree += (sum(scores) < 0) == (row["overall_preference"] < 0)
        votes = [3 - 2 * int(found[1]) for reason in reasons if (found := _WORDS.search(reason))]
        if sum(votes):
            worded += 1
            words_agree += (sum(votes) > 0) == (taken == 1)
        if reasons and taken not in examples:
            examples[taken] = (
                f"overall_preference {int(row['overall_preference']):+d}, scores {scores}: response {taken} is chosen; an "
                f'annotator: "{" ".join(reasons[0].split())[:300]}"'
            )
    return SignCheck(scored, scores_agree, worded, words_agree, list(examples.values()))


@dataclass(frozen=True)
class Converter:
    """How one data set becomes rows."""

    row: Callable[..., dict[str, Any] | str]
    """A row of the data set -> a row for the stages, or why there is none. Takes `language` where there is a choice."""
    kind: Kind
    """What the rows are."""
    hub: str
    """Where the data set is published."""
    split: str = "train"
    subset: str | None = None
    language: str | None = None
    """The language taken where none is named; None where the data set does not tell languages apart."""
    check: Callable[[Iterable[dict[str, Any]]], SignCheck] | None = None
    """A look at a sample of the rows."""


CONVERTERS = {
    "helpsteer3": Converter(helpsteer3, "pair", "nvidia/HelpSteer3", language="english", check=check_sign),
    "helpsteer3_prompts": Converter(helpsteer3_prompts, "prompt", "nvidia/HelpSteer3", language="english"),
    "gsm8k": Converter(gsm8k, "conversation", "openai/gsm8k", subset="main"),
    "ultrafeedback_binarized": Converter(
        ultrafeedback_binarized, "pair", "HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"
    ),
}


@dataclass
class Conversion:
    """What became of the rows."""

    read: int = 0
    written: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> sound rows that the converter leaves out."""
    problems: Problems = field(default_factory=Problems)
    """Rows that cannot be used."""
    check: SignCheck | None = None

    def lines(self) -> list[str]:
        """Counts and the check, for people."""
        skipped = [f"{count:,} skipped: {reason}" for reason, count in self.skipped.most_common()]
        checked = self.check.lines() if self.check else []
        return [f"{self.read:,} rows read, {self.written:,} written", *skipped, *self.problems.summary(), *checked]


def convert_rows(
    name: str,
    out: Path,
    source: str | None = None,
    language: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    shuffle: bool = False,
) -> Conversion:
    """Write the rows of the data set `name` to the .jsonl or .parquet file `out`, whole or not at all.

    `source`: a local file or directory, or a hub id; None reads the published data set. `limit`: rows written, after
    the filters; with `shuffle`, drawn from all of them, in an order of their own. InputError where `out` has another suffix, where `name` or `source` does not exist, where no row is left, and where most of a sample
    contradicts the sign of the preferences.
    """
    converter = CONVERTERS.get(name)
    if converter is None:
        raise InputError(f"there is no converter {name!r}; use one of {', '.join(CONVERTERS)}")
    require_format(out)
    if language and not converter.language:
        raise InputError(f"--language: {name} does not tell languages apart; leave it out")
    make = partial(converter.row, language=language or converter.language) if converter.language else converter.row
    place = SourceRecipe(path=source or converter.hub, split=split or converter.split, subset=converter.subset)
    done = Conversion()
    written: list[dict[str, Any]] = []
    sample: list[dict[str, Any]] = []
    draws = random_stream("convert", "sign check")
    for origin, row in read_rows(place):
        if len(written) == limit and not shuffle:
            break
        done.read += 1
        if isinstance(row, str):
            done.problems.add_text(row, origin)
            continue
        made = make(row)
        if isinstance(made, str):
            done.skipped[made] += 1
            continue
        checked = ROW_FUNCTIONS[converter.kind](made, origin, ColumnsRecipe())
        if isinstance(checked, str):
            done.problems.add_text(checked, origin)
            continue
        written.append(made)
        # Each row that is written is in the sample with the same probability, wherever it stands in the file.
        if len(sample) < SAMPLE:
            sample.append(row)
        elif (slot := int(draws.integers(len(written)))) < SAMPLE:
            sample[slot] = row
    if shuffle:
        order = random_stream("convert", "shuffle").permutation(len(written))[:limit]
        written = [written[place] for place in order]
    done.written = len(written)
    if not written:
        raise InputError(f"{place.path}: no row to write; {'; '.join(done.lines()[1:]) or 'there are no rows'}")
    if converter.check:
        done.check = converter.check(sample)
        if done.check.inverted:
            raise InputError(
                f"{place.path}: the sign of the preferences is the other way round; nothing was written. "
                + "; ".join(done.check.lines())
            )
    write_rows(out, written)
    return done


def reference_answer(prompt: Prompt, columns: ColumnsRecipe) -> str | None:
    """The answer that the row gives as text: in `completion`, else in `label`, else the last one of the conversation
    in `messages` or `chosen`, from which the prompt was taken. None where there is none.
    """
    for name in (columns.completion, columns.label):
        value = prompt.row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if (found := _last_answer(value, name)) is not None:
            return found
    given = any(prompt.row.get(name) is not None for name in (columns.prompt, columns.context_messages))
    names = (columns.chosen,) if given else (columns.messages, columns.chosen)
    return next((found for name in names if (found := _last_answer(prompt.row.get(name), name)) is not None), None)


def _last_answer(value: Any, name: str) -> str | None:
    """The text of an answer, or of the last answer among messages; None for anything else."""
    if isinstance(value, str):
        return value if value.strip() else None
    try:
        messages = as_messages(value, name, "assistant") if isinstance(value, list) else []
    except Unusable:
        return None
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return said[-1] if said and isinstance(said[-1], str) and said[-1].strip() else None
