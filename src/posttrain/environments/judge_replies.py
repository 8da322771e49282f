"""What a judge may reply: one JSON object of a known form. Anything else is no score."""

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.engines.openai import shortened

_SENTENCE = '"reason": "one sentence"'


@dataclass(frozen=True)
class Judged:
    """What a judge said, and why, in its words."""

    value: float
    reason: str


class ReplyForm(Protocol):
    """A form of reply: how it is asked for, and how it is read."""

    @property
    def identity(self) -> list[Any]:
        """Tells forms apart in keys of the cache, as JSON values; it changes with what `read` takes."""

    @property
    def asked(self) -> str:
        """The object that is wanted, in words for the judge."""

    @property
    def properties(self) -> dict[str, Any]:
        """The JSON schema of each key; the reason first, so that what comes after follows from it."""

    def read(self, reply: dict[str, Any]) -> float:
        """The value of a reply. ValueError says what is wrong with it, as what the judge did.

        The last key of `properties` is in it.
        """


@dataclass(frozen=True)
class PointsReply:
    """A number of points from `low` to `high`."""

    low: int
    high: int

    @property
    def identity(self) -> list[Any]:
        return ["a JSON object with reason and score", *([self.low] if self.low else []), self.high]

    @property
    def asked(self) -> str:
        return f'{{{_SENTENCE}, "score": a whole number from {self.low} (worst) to {self.high} (best)}}'

    @property
    def properties(self) -> dict[str, Any]:
        return {"reason": {"type": "string"}, "score": {"type": "integer"}}

    def read(self, reply: dict[str, Any]) -> float:
        points = reply["score"]
        number = isinstance(points, int | float) and not isinstance(points, bool)
        if not number or not self.low <= points <= self.high:
            raise ValueError(f"gave the score {_value(points)}, which is no number from {self.low} to {self.high}")
        return float(points)


@dataclass(frozen=True)
class ClaimsReply:
    """The claims of a text, each of which is supported or not; the value is the share that is, in [0, 1]."""

    @property
    def identity(self) -> list[Any]:
        return ["a JSON object with reason and claims"]

    @property
    def asked(self) -> str:
        return f'{{{_SENTENCE}, "claims": [{{"claim": "in a few words", "supported": true or false}}, and so on]}}'

    @property
    def properties(self) -> dict[str, Any]:
        claim = _object({"claim": {"type": "string"}, "supported": {"type": "boolean"}})
        return {"reason": {"type": "string"}, "claims": {"type": "array", "items": claim}}

    def read(self, reply: dict[str, Any]) -> float:
        claims = reply["claims"]
        if not isinstance(claims, list) or not claims:
            raise ValueError(f"gave {_value(claims)} for the claims, which is no list that holds one")
        for claim in claims:
            if not isinstance(claim, dict) or not isinstance(claim.get("supported"), bool):
                raise ValueError(f'gave the claim {_value(claim)}, which has no "supported" that is true or false')
        return sum(claim["supported"] for claim in claims) / len(claims)


@dataclass(frozen=True)
class ChoiceReply:
    """Which of two is better: 1 for the first, 0 for the second, 1/2 for neither."""

    @property
    def identity(self) -> list[Any]:
        return ["a JSON object with reason and better"]

    @property
    def asked(self) -> str:
        return f'{{{_SENTENCE}, "better": "first" or "second" or "tie"}}'

    @property
    def properties(self) -> dict[str, Any]:
        return {"reason": {"type": "string"}, "better": {"type": "string", "enum": ["first", "second", "tie"]}}

    def read(self, reply: dict[str, Any]) -> float:
        better = reply["better"]
        values = {"first": 1.0, "second": 0.0, "tie": 0.5}
        if not isinstance(better, str) or better not in values:
            raise ValueError(f'said that {_value(better)} is better, which is not "first", "second" or "tie"')
        return values[better]


def read_reply(text: str, form: ReplyForm) -> Judged:
    """What a reply says: one JSON object, alone or alone in a code block. ValueError says what is wrong with it."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n\s*```\s*", text, re.DOTALL)
    try:
        reply = json.loads(
            fenced.group(1) if fenced else text, object_pairs_hook=_without_repeats, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"did not reply with {_wanted(form)}: {shortened(text)}") from error
    wanted = list(form.properties)[-1]
    if not isinstance(reply, dict) or wanted not in reply:
        raise ValueError(f"did not reply with {_wanted(form)}: {shortened(text)}")
    return Judged(form.read(reply), str(reply.get("reason", "")))


def reply_schema(form: ReplyForm) -> dict[str, Any]:
    """The form for servers that hold the model to it (`response_format`)."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": _object(form.properties)},
    }


def _value(value: Any) -> str:
    return shortened(repr(value))


def _wanted(form: ReplyForm) -> str:
    return f'one JSON object that has a "{list(form.properties)[-1]}"'


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError on a repeated key, of which the last would win."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
