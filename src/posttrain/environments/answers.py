"""Answer formats: how a policy writes its actions, and the strict reading of what it wrote."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, field_validator

from posttrain.recipe.base import Part

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True)
class Rejected:
    """An answer that was not understood; `reason` is a short text, never empty."""

    reason: str


class FormatRecipe(Part):
    """How the policy writes an answer, and what an answer that breaks the rules costs."""

    thinking: bool = False
    """The answer is `<think>…</think><answer>…</answer>`; otherwise `<answer>…</answer>` alone."""
    prime: bool = False
    """Every answer is begun for the policy, with `<think>` when thinking and `<answer>` otherwise."""
    penalty: float = Field(-0.1, le=0)
    """Added to the reward of a turn whose answer was rejected."""
    separator: str = "||"
    """Stands between the actions of one answer."""
    actions_per_turn: int = Field(1, ge=1, le=10)
    """Most actions in one answer; an answer with more is rejected."""

    @field_validator("separator")
    @classmethod
    def _separator_is_visible(cls, value: str) -> str:
        if value != value.strip() or not value or "<" in value or ">" in value or any(c.isalnum() for c in value):
            raise ValueError("a separator is made of signs other than < and >, without spaces around it")
        return value

    def primer(self) -> str:
        """What the answer is begun with: `<think>`, `<answer>`, or nothing."""
        if not self.prime:
            return ""
        return "<think>" if self.thinking else "<answer>"

    def render(self, actions: Sequence[str], thought: str = "") -> str:
        """The answer that plays `actions`; `parse` reads it back. `thought` must not hold any of the tags."""
        answer = f"<answer>{f' {self.separator} '.join(actions)}</answer>"
        return f"<think>{thought}</think>{answer}" if self.thinking else answer

    def instructions(self, names: Sequence[str]) -> str:
        """The sentences that tell a policy how to answer with the actions `names` (two or more)."""
        forms = [self._answer_form(name) for name in names]
        choice = f"{', '.join(forms[:-1])} or {forms[-1]}"
        text = (
            f"Answer only <think>your reason</think> and then {choice}." if self.thinking else f"Answer only {choice}."
        )
        if self.actions_per_turn > 1:
            several = self._answer_form(f"{names[0]} {self.separator} {names[1]}")
            text += f" An answer may hold up to {self.actions_per_turn} actions: {several}."
        return text

    def parse(self, text: str, names: Sequence[str]) -> tuple[str, ...] | Rejected:
        """The actions in the answer `text` (primer in front), spelt as in `names`, or why it is rejected.

        White space around and between the tags and around actions is free, and the case of actions does not matter;
        anything else outside the tags is an error. Chat markers must have been taken off before.
        """
        found = self._inside(text)
        if isinstance(found, Rejected):
            return found
        if not found:
            return Rejected("empty answer")
        words = [word.strip() for word in found.split(self.separator)]
        if len(words) > self.actions_per_turn:
            return Rejected(f"too many actions: {len(words)}, allowed {self.actions_per_turn}")
        known = {name.casefold(): name for name in names}
        for word in words:
            if word.casefold() not in known:
                return Rejected(f"unknown action '{' '.join(word[:24].split())}'")
        return tuple(known[word.casefold()] for word in words)

    def _inside(self, text: str) -> str | Rejected:
        """What stands between `<answer>` and `</answer>`, if the text has the form of this format."""
        wanted = TAGS if self.thinking else TAGS[2:]
        for tag in TAGS:
            if text.count(tag) > 1:
                return Rejected(f"more than one {tag}")
            if tag in text and tag not in wanted:
                return Rejected(f"{tag} is not part of the format")
        for tag in ("<answer>", *wanted):
            if tag not in text:
                return Rejected(f"no {tag}")
        places = [text.index(tag) for tag in wanted]
        if places != sorted(places):
            return Rejected("tags in the wrong order")
        outside = text[: places[0]] + text[places[-1] + len(wanted[-1]) :]
        if self.thinking:
            outside += text[places[1] + len("</think>") : places[2]]
        if outside.strip():
            return Rejected("text outside the tags")
        return text[places[-2] + len("<answer>") : places[-1]].strip()

    @staticmethod
    def _answer_form(action: str) -> str:
        return f"<answer>{action}</answer>"
