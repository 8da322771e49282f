"""Converters from published data sets to rows that the stages read.

Converted rows pass the same checks as in the stages, so a converted file contains only usable rows.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.data.examples import ROW_FUNCTIONS, Kind
from posttrain.data.files import read_split, require_format, write_rows
from posttrain.data.messages import PromptExample, UnusableRow, as_messages
from posttrain.data.problems import Problems
from posttrain.errors import InputError
from posttrain.recipe.data import ColumnsRecipe, SourceRecipe
from posttrain.recipe.pipeline import ConvertRecipe
from posttrain.seeds import random_stream

ANY = "any"
"""The language value that keeps every row."""


def helpsteer3_prompts(row: dict[str, Any], language: str = "english") -> dict[str, Any] | str:
    """Return the prompt of a row, regardless of its preference, or the reason to skip the row."""
    if _other_language(row, language):
        return f"language is not {language}"
    prompt = {"context_messages": row.get("context")}
    return {**prompt, "domain": row["domain"]} if row.get("domain") is not None else prompt


def _other_language(row: dict[str, Any], language: str) -> bool:
    value = row.get("language")
    return language != ANY and not (isinstance(value, str) and value.lower() == language.lower())


def helpsteer3(row: dict[str, Any], language: str = "english") -> dict[str, Any] | str:
    """Return a preference pair, or the reason to skip the row.

    By the data set's card, `overall_preference` ranges from -3 (response 1 is much better) to 3 (response 2 is much
    better), and 0 means about equal. The margin is its absolute value.
    """
    if _other_language(row, language):
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
    """Return a question and its worked answer as a prompt and a completion."""
    return {"prompt": row.get("question"), "completion": row.get("answer")}


def ultrafeedback_binarized(row: dict[str, Any]) -> dict[str, Any] | str:
    """Return a preference pair whose margin is the difference of the scores, or the reason to skip the row."""
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
    # Both sides are usually complete conversations that already contain the prompt.
    first = pair["chosen"][0] if isinstance(pair["chosen"], list) and pair["chosen"] else {"role": "assistant"}
    answers_only = isinstance(first, dict) and first.get("role") == "assistant"
    return {"prompt": row.get("prompt"), **pair} if answers_only else pair


def own_rows(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row unchanged, for the user's rows, which the stages already read."""
    return row


@dataclass(frozen=True)
class Converter:
    """The conversion of one data set."""

    row: Callable[..., dict[str, Any] | str]
    """A row of the data set -> a row for the stages, or the reason to skip it. Takes `language` if `language` is
    set."""
    kind: Kind
    """The kind of the converted rows."""
    hub: str | None = None
    """The hub id of the data set. None: the rows are the user's own."""
    split: str = "train"
    subset: str | None = None
    language: str | None = None
    """The default language; None if the rows have no language."""


CONVERTERS = {
    "helpsteer3": Converter(helpsteer3, "pair", "nvidia/HelpSteer3", subset="preference", language="english"),
    "helpsteer3_prompts": Converter(
        helpsteer3_prompts, "prompt", "nvidia/HelpSteer3", subset="preference", language="english"
    ),
    "gsm8k": Converter(gsm8k, "conversation", "openai/gsm8k", subset="main"),
    "ultrafeedback_binarized": Converter(
        ultrafeedback_binarized, "pair", "HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"
    ),
    "conversations": Converter(own_rows, "conversation"),
    "pairs": Converter(own_rows, "pair"),
    "prompts": Converter(own_rows, "prompt"),
}


@dataclass
class Conversion:
    """The result of a conversion."""

    read: int = 0
    written: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> valid rows that the converter skips."""
    problems: Problems = field(default_factory=Problems)
    """Unusable rows."""

    def lines(self, done: str = "written") -> list[str]:
        """Return the counts as lines of text. `done`: what happens to usable rows."""
        skipped = [f"{count:,} skipped: {reason}" for reason, count in self.skipped.most_common()]
        return [f"{self.read:,} rows read, {self.written:,} {done}", *skipped, *self.problems.summary()]


def find_converter(name: str) -> Converter:
    """Return the converter of this name; InputError if there is none."""
    if name not in CONVERTERS:
        raise InputError(f"unknown converter {name!r}; use one of {', '.join(CONVERTERS)}")
    return CONVERTERS[name]


def convert_rows(
    name: str,
    out: Path | None,
    source: str | None = None,
    language: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    shuffle: bool = False,
    subset: str | None = None,
) -> Conversion:
    """Convert the data set `name` and write it to the .jsonl or .parquet file `out` atomically.

    Args:
        out: None counts the rows and writes nothing.
        source: a local file or directory, or a hub id; None reads the published data set. Of a directory, the files
            whose names contain the split are read (`read_split`).
        limit: maximum number of rows to write. With `shuffle` they are drawn from all rows.
        subset: subdirectory of a directory, or configuration of a hub data set; None: that of the published data set.

    Raises:
        InputError: `out` has another suffix, `name` or `source` is unknown, or there is no row to write.
    """
    converter = find_converter(name)
    if out is not None:
        require_format(out)
    if language and not converter.language:
        raise InputError(f"language: the rows of {name} have no language; remove this option")
    path = source or converter.hub
    if path is None:
        raise InputError(f"{name}: these rows are your own; name their file, directory or hub id")
    convert = partial(converter.row, language=language or converter.language) if converter.language else converter.row
    rows_source = SourceRecipe(path=path, split=split or converter.split, subset=subset or converter.subset)
    result = Conversion()
    written: list[dict[str, Any]] = []
    for origin, row in read_split(rows_source):
        if len(written) == limit and not shuffle:
            break
        result.read += 1
        if isinstance(row, str):
            result.problems.add_text(row, origin)
            continue
        converted = convert(row)
        if isinstance(converted, str):
            result.skipped[converted] += 1
            continue
        try:
            ROW_FUNCTIONS[converter.kind](converted, origin, ColumnsRecipe())
        except UnusableRow as problem:
            result.problems.add_text(str(problem), origin)
        else:
            written.append(converted)
    if shuffle:
        order = random_stream("convert", "shuffle").permutation(len(written))[:limit]
        written = [written[index] for index in order]
    result.written = len(written)
    if not written:
        raise InputError(
            f"{rows_source.path}: no row to write; {'; '.join(result.lines()[1:]) or 'the source has no rows'}"
        )
    if out is not None:
        write_rows(out, written)
    return result


def convert_files(
    recipe: ConvertRecipe, directory: Path | None, report: Callable[[str], None], planned: bool = False
) -> None:
    """Write the files of a `convert` stage to `directory` and a line for each count to `report`.

    Without a directory, rows of local sources are counted and nothing is written. `planned`: word the lines for rows
    that a run would write. InputError as `convert_rows`.
    """
    for name, file in recipe.files.items():
        out = directory / f"{name}.jsonl" if directory is not None else None
        try:
            source = recipe.source or find_converter(file.converter).hub
            if source is not None and not Path(source).expanduser().exists() and source.count("/") != 1:
                raise InputError(
                    f"{source}: no such file or folder, and no id of the hub, which has the form OWNER/NAME"
                )
            if directory is None and source is not None and not Path(source).expanduser().exists():
                report(f"{name}.jsonl: rows of {source}, which is read when the stage runs")
                continue
            done = convert_rows(file.converter, out, source, **file.model_dump(exclude={"converter"}))
        except InputError as error:
            raise InputError(f"files.{name}: {error}") from error
        for line in done.lines("to write" if out is None or planned else "written"):
            report(f"{name}.jsonl: {line}")


def reference_answer(prompt: PromptExample, columns: ColumnsRecipe) -> str | None:
    """Return the reference answer of the row as text; None if there is none.

    This is `completion`, else `label`, else the last answer of the conversation (`messages` or `chosen`) that the
    prompt was taken from.
    """
    for name in (columns.completion, columns.label):
        value = prompt.row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if (answer := _last_answer(value, name)) is not None:
            return answer
    has_prompt = any(prompt.row.get(name) is not None for name in (columns.prompt, columns.context_messages))
    names = (columns.chosen,) if has_prompt else (columns.messages, columns.chosen)
    answers = (_last_answer(prompt.row.get(name), name) for name in names)
    return next((answer for answer in answers if answer is not None), None)


def _last_answer(value: Any, name: str) -> str | None:
    """Return the text of an answer, or of the last answer among messages; None for anything else."""
    if isinstance(value, str):
        return value if value.strip() else None
    try:
        messages = as_messages(value, name, "assistant") if isinstance(value, list) else []
    except UnusableRow:
        return None
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return answers[-1] if answers and isinstance(answers[-1], str) and answers[-1].strip() else None
