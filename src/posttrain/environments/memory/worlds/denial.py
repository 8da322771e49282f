"""What a reply says is so: the reply without what it denies."""

import re

_CLAUSE = re.compile(
    r"(?:[.!?;]+(?=[\s\"')*_]|$)|\n|[,;]?\s+(?<!anything )(?<!anything, )(?<!everything )(?<!nothing )(?<!all )but\b(?! for\b)"
    r"|,?\s+(?:however|instead it)\b|,\s+(?=(?:it|that|this|he|she|they)(?:'s|'re| is| are| was| were)\b))",
    re.IGNORECASE,
)
_NOT_TOLD = re.compile(
    r"\b(?:(?:may|can|could|must|will|would|am|are|is|do|does)(?:\s?not|n't)|won't|can't|not)\s+(?:be\s+)?(?:able|allowed|permitted)?"
    r"(?:\s?to)?\s*(?:share|reveal|tell|told|disclose|give|provide|shared|disclosed|revealed)\b",
    re.IGNORECASE,
)
"""Says that something is kept private, not that it is not so."""
_BEFORE = re.compile(
    r"\b(?:not|never|no longer|neither|nor|none of|\w+n't|anything but|anything, but|everything but|everything except"
    r"|all but|nothing like|except|apart from|other than|instead of|rather than|far from|i (?:doubt|deny|reject)|false that"
    r"|wrong that|untrue that|incorrect that|a lie that|a myth that)\b",
    re.IGNORECASE,
)
_WRONG = (
    r"(?:false|wrong|incorrect|untrue|mistaken|invalid|inaccurate|made up|a lie|a mistake|out of the question"
    r"|(?:not|far from) (?:right|true|correct|so|it|the case|valid|accurate))"
)
_AFTER = re.compile(
    rf"(?:\b(?:is|are|was|were|would be|sounds|seems)|'s|'re)\s+(?:\w+ly\s+|all\s+|quite\s+)?{_WRONG}\b"
    r"|\b(?:isn't|aren't|wasn't|weren't) (?:right|true|correct|so|it|the case|valid|accurate)\b|,\s*not[.!]?\s*$",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    rf"\s*(?:(?:but|and|no),?\s+)?(?:that|this|it)(?: is|'s| was)\s+(?:\w+ly\s+|all\s+)?{_WRONG}\b", re.I
)


def affirmed(reply: str) -> str:
    """The reply with a blank for what it denies.

    In a clause, that is what follows `not`, `anything but` and the like, and all of a clause that ends in `is false` or
    the like, or before a clause that takes it back (`That is false.`). To decline to tell a thing denies nothing.
    """
    text = reply.replace("’", "'")
    kept: list[str] = []
    start = 0
    for end in [*(match.end() for match in _CLAUSE.finditer(text)), len(text)]:
        clause, start = text[start:end], end
        if _TAKEN_BACK.match(clause):
            while kept and not kept.pop().strip():
                pass
            continue
        if _AFTER.search(clause):
            continue
        cue = _BEFORE.search(_NOT_TOLD.sub(lambda match: " " * len(match.group()), clause))
        kept.append(f"{clause[: cue.start()]}\n" if cue else clause)
    return "".join(kept)
