"""Rubrics: where they come from, and the prompts to a judge that they make of predictions."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from posttrain.environments.judge import ChoiceReply, ClaimsReply, PointsReply, ReplyForm
from posttrain.environments.untrusted import Prompt, Texts, template_prompt
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction, digest_of
from posttrain.recipe.judge import FIELD, Anchor, PointsScale, Rubric
from posttrain.recipe.sources import Layer, read_text
from posttrain.recipe.validation import validation_errors

_PACKAGED = Path(__file__).parent.parent / "rubrics"
_ONE = (
    "You judge one prediction, `prediction`, by a rubric. It and what there is to judge it by, such as the messages that "
    "it answers, stand in frames"
)
_TWO = (
    "You compare two predictions for the same prompt, `first` and `second`, by a rubric. Which of them comes first says "
    "nothing about them. They and what there is to judge them by, such as the messages that they answer, stand in frames"
)


@dataclass(frozen=True)
class Question:
    """What a judge is asked, and the form of its reply."""

    prompt: Prompt
    form: ReplyForm
    in_part: tuple[str, ...]
    """The fields of which only the beginning is shown."""

    @property
    def digest(self) -> str:
        """Of the prompt; 16 hexadecimal digits."""
        return digest_of(self.prompt)


class NotToBeAsked(Exception):
    """A row lacks what the rubric shows; the message says what, in two words."""


def packaged_rubrics() -> list[str]:
    """Names of the rubrics that come with the package."""
    return sorted(file.stem for file in _PACKAGED.glob("*.yaml"))


def load_rubric(named: str) -> Rubric:
    """A packaged rubric by its name, or one in a file of the user's; InputError names the line of what is wrong."""
    names = packaged_rubrics()
    file = _PACKAGED / f"{named}.yaml" if named in names else Path(named)
    if not file.is_file():
        near = difflib.get_close_matches(named, names, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(names)}, or a .yaml file"
        raise InputError(f"--rubric: there is no rubric or file {named!r}; {hint}")
    try:
        layer = read_text(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--rubric: {file} cannot be read as text ({error}); name a YAML file") from error
    sentences = _wrong_anchors(layer)
    try:
        if not sentences:
            return Rubric.model_validate_json(json.dumps(layer.values, default=str), strict=True)
    except ValidationError as error:
        sentences = validation_errors(error, Rubric, layer, Rubric)
    raise InputError("\n".join(one if one.startswith(str(file)) else f"{file}: {one}" for one in sentences))


def rubric_digest(rubric: Rubric) -> str:
    """Of all that a rubric says; 16 hexadecimal digits."""
    return digest_of(rubric.model_dump(mode="json"))


def judging(rubric: Rubric, row: Prediction, longest: int) -> Question:
    """The question of what a prediction is worth by itself, showing `longest` characters of each text at most.

    Raises NotToBeAsked where the row lacks a field of the template.
    """
    scale = rubric.scale
    form: ReplyForm = ClaimsReply()
    if isinstance(scale, PointsScale):
        form = PointsReply(scale.anchors[0].points, scale.anchors[-1].points)
    return _question(rubric, row, _ONE, [("prediction", row.text)], form, longest, "Judge the framed prediction")


def comparing(rubric: Rubric, row: Prediction, first: str, second: str, longest: int) -> Question:
    """The question which of two predictions for the prompt of `row` is better; otherwise as `judging`."""
    texts = [("first", first), ("second", second)]
    return _question(rubric, row, _TWO, texts, ChoiceReply(), longest, "Compare the framed first and second")


def scale_in_words(rubric: Rubric) -> str:
    """The range of scores, for a reader of results."""
    scale = rubric.scale
    if isinstance(scale, PointsScale):
        return f"{scale.anchors[0].points} to {scale.anchors[-1].points}, more is better"
    return "share of claims that are supported, 0 to 1"


def _question(
    rubric: Rubric, row: Prediction, what: str, judged: Texts, form: ReplyForm, longest: int, request: str
) -> Question:
    fields: dict[str, Texts] = {"prediction": judged}
    for name in set(FIELD.findall(rubric.template)) - {"prediction"}:
        texts = _prompt(row) if name == "prompt" else [("reference", row.reference or "")]
        if not any(text.strip() for _, text in texts):
            raise NotToBeAsked(f"no {name}")
        fields[name] = texts
    cut = {name: [(who, _cut(text, longest)) for who, text in texts] for name, texts in fields.items()}
    in_part = tuple(name for name, texts in sorted(fields.items()) if any(len(text) > longest for _, text in texts))
    prompt = template_prompt(what, _words(rubric, form), form.instructions, rubric.template, cut, request)
    return Question(prompt, form, in_part)


def _words(rubric: Rubric, form: ReplyForm) -> str:
    """What the judge is told to look at."""
    scale, told = rubric.scale, [rubric.measures.strip(), ""]
    if isinstance(scale, PointsScale):
        alone = "The points that each alone would get" if isinstance(form, ChoiceReply) else "The points"
        told += [f"{alone}:", *(f"{anchor.points}: {anchor.means.strip()}" for anchor in scale.anchors)]
    else:
        told += [f"A claim: {scale.claim.strip()}", f"A claim is supported when: {scale.supported.strip()}"]
        told += [
            "The better one has the larger share of claims that are supported."
            if isinstance(form, ChoiceReply)
            else "List every claim of the framed prediction, and say of each whether it is supported."
        ]
    return "\n".join(told)


def _wrong_anchors(layer: Layer) -> list[str]:
    """What is wrong with single anchors, which are sections in a list and so have no dotted keys."""
    scale = layer.values.get("scale")
    anchors = scale.get("anchors") if isinstance(scale, dict) else None
    sentences: list[str] = []
    for place, anchor in enumerate(anchors if isinstance(anchors, list) else []):
        if isinstance(anchor, dict):
            try:
                Anchor.model_validate_json(json.dumps(anchor, default=str), strict=True)
            except ValidationError as error:
                own = layer.part("scale", "anchors", str(place))
                sentences += validation_errors(error, Anchor, own, Anchor)
    return sentences


def _prompt(row: Prediction) -> Texts:
    texts = []
    for message in row.prompt or []:
        calls = message.get("tool_calls")
        content = message["content"] + (f"\n{json.dumps(calls, ensure_ascii=False)}" if calls else "")
        texts.append((message["role"], content))
    return texts


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}\n({len(text) - longest} more characters)"
