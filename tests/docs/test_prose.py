"""Pages, docstrings, help texts and messages are plain technical English, and the written pages stay short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIALECT = {
    "personification": r"\b(is|are|was|were) told\b|\bnobody\b|\bspeaks? (again|up)\b|\bbefell\b|\bhearsay\b",
    "lending and mending": r"\blen(t|ds?)\b|\bmend(s|ed|ing)?\b|\bowed\b",
    "riddles": r"what it did not|what (it|they) (replied|did) (is|are) kept|for want of|in the same breath|\bsame breath\b",
    "odd adverbs": r"\bseldom\b|\bby themselves\b|\banew\b(?! paper)|\bthereof\b|\bwherefrom\b|\bas it comes\b|\bas it stands\b",
    "is no": r"(?<![Tt]here )\b(?:is|are) no (?:note|run|file|file's|link|block|place|model|number|character|key|recipe|directory|"
    r"metric|proof|penalty|environment|checkout|vault|part|sample)\b",
    "standing and lying": r"\bstands? (?:there|beside|in the file|in the row)\b|\bl(?:ies|ie) (?:there|where|in the folder|around)\b",
    "one's own": r"\bone's own\b|\bof ours\b|\bof theirs\b",
    "strangers": r"\bstrangers?\b",
    "whole": r"\bthe whole of (?:it|the)\b|\bnot told from\b",
    "crowned words": r"\bremarks\b(?!\w)|\bWere it\b|\bbe it (?:a|the)\b|\bwhat became of\b|\bbecomes of\b",
    "the word of": r"\b(?:model|critic|judge)'s word\b|\bits word\b",
    "knowing": r"\b(?:program|tool|importer|export|environment|function) knows\b|\b(?:has|have) forgotten\b|\bteach(?:es)? nothing\b",
    "no verb": r"\bhas not the\b|\bis no (?:path|UTF-8|judge)\b|\bcharacters that are no\b|\bit as it was written\b",
    "idioms": r"\bsigns? of life\b|\bleaves? word\b|\btaken? along\b|\bpleased? (?:a|the) judge\b|\bin (?:its|their) place (?:is|are)\b"
    r"|\bkeys of the keyboard\b|\bmake no more steps\b|\bmost surely\b|\bare over after\b|\bdeath more than\b",
    "adverbs of place": r"\bstored nowhere\b|\bin vain\b|\bwith the model as it is\b|\bas it stood\b",
    "its own": r"\b(?:a|an) [\w`-]+ of its own\b|\bof our own\b",
    "where for if": r"\b(?:Value|Type|Run|Runtime|Key|OS)Error where\b|\b(?:RewardFailure|CallRefused|UnusableRow|Refusal) where\b"
    r"|\bInputError where (?!there is nothing)",
    "whatever": r"\bwhatever (?:the|its|their|a|an)\b|\bwhatever it (?:is|was)\b|\bwhoever (?!it claims)",
    "another than": r"\b(?:another|other) [\w-]+ than\b",
    "learned from": r"\b(?:is|are|was|were) learned from\b",
    "nothing of": r"\b(?:knows?|keeps?|holds?|has|have|had|seen|sees|explains?|names?|leaves?) (?:almost )?nothing of\b",
    "asked for": r"\b(?:is|are|was|were) asked for\b|\bis to be had\b",
    "what and those": r'"""(?:Those (?:of|that)|Inside, |Most (?:tokens|seconds|characters|bytes|rows|episodes|turns)\b)',
    "beginnings": r"\bfrom (?:its|their) beginning on\b|\bbegins? alike\b",
    "sitting": r"\bsits? (?:on|in|at)\b",
    "half words": r"\bhalf characters\b|\bobeys?\b|\b(?:of|is|are) none of the\b|\bfor ever\b|\bthrown away\b|\b(?:told|tells?) apart\b",
    "reading": r"\band never reads it\b|\bthe further words\b|\bnothing chooses among\b|\bfail where the run\b",
}
"""Constructions of the old pages, by kind. None may come back."""
DATA = (
    "worlds/",
    "privacy/",
    "prompts.py",
    "judging.py",
    "baselines.py",
    "rationales/",
    "rubrics/",
    "docs/results/coverage.md",
)
"""Sources whose strings are data or prompts of a model, and a page of commands that a script writes."""
WRITTEN_WORDS = 35_000
GENERATED = (
    "reference/recipes.md",
    "reference/families.md",
    "results/coverage.md",
    "results/crosscheck.md",
    "results/intervals.md",
)


def prose() -> list[Path]:
    """The pages, the recipes, the sources and the benchmarks."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.yaml")]
    found += [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml"), *(ROOT / "examples").glob("*.py")]
    found += [*(ROOT / "benchmarks").rglob("*.py")]
    return [file for file in found if not any(part in file.as_posix() for part in DATA)]


@pytest.mark.parametrize("kind", DIALECT)
def test_no_page_docstring_or_message_has_the_old_dialect(kind):
    pattern = re.compile(DIALECT[kind])
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in prose()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert wrong == []


def test_the_check_finds_the_dialect():
    sentences = ("It is told at the end.", "mend it", "what it did not, is told", "x is no note", "in the same breath")
    sentences += (
        "a stream of its own",
        "which is stored nowhere",
        "the tool knows it",
        "has not the gradient",
        "leave word of it",
        "ValueError where the row is empty",
        "in float32 whatever the dtype",
        "another tokenizer than the policy",
        "the tokens that are learned from",
        "it explains almost nothing of the mean",
        "the sentences that are asked for",
        "shared from their beginning on",
        "the reward sits on the last token",
        "a label that is none of the classes",
    )
    for sentence in sentences:
        assert any(re.search(pattern, sentence) for pattern in DIALECT.values()), sentence
    assert not any(re.search(pattern, "There is no note of this name.") for pattern in DIALECT.values())


def test_a_paragraph_after_code_is_a_sentence():
    """A block of code is not the subject of the sentence below it."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    after = re.compile(r"^```\w*\n.*?^```\n\n((?!verl)[a-z][^\n]*)", re.M | re.S)
    found = [(page.name, text) for page in pages for text in after.findall(page.read_text(encoding="utf-8"))]
    assert found == []


def written_words(text: str, with_tables: bool) -> int:
    """Words of a page without its code; `with_tables`: the cells of its tables count."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    if not with_tables:
        text = re.sub(r"^\|.*$", "", text, flags=re.M)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_pages_are_short():
    """Generated pages do not count, nor do the tables of results, which scripts print."""
    docs = ROOT / "docs"
    pages = [page for page in docs.rglob("*.md") if page.relative_to(docs).as_posix() not in GENERATED]
    words = {
        page: written_words(page.read_text(encoding="utf-8"), "results" not in page.relative_to(docs).parts[0])
        for page in pages
    }
    assert sum(words.values()) <= WRITTEN_WORDS, sum(words.values())
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) < 120
