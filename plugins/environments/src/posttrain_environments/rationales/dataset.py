"""Data sets of procedures for synthetic policies: conversations, pairs and prompts as parquet files."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.files import write_rows
from posttrain.data.messages import Message
from posttrain.errors import RunError
from posttrain.seeds import random_stream
from posttrain_environments.rationales.corruption import KINDS, Corruption, corrupt
from posttrain_environments.rationales.domains import describe, draw_policy
from posttrain_environments.rationales.policies import Policy, plain
from posttrain_environments.rationales.procedures import Procedure, best_procedure, write
from posttrain_environments.rationales.verifier import Verdict, verify

SPLITS = ("test", "val", "train")
"""In the order in which their policies are drawn, so that the number of training rows does not affect the others."""
FEWEST_STEPS, MOST_STEPS = 3, 7
PAIRS_PER_POLICY = 2

_INSTRUCTION = """\
Write this as a procedure of yes/no steps that asks as few questions as possible on average; all combinations of answers \
count the same. One step per line, labelled A, B, C, ..., starting at A:
A. <question from the list> If YES, <next>. If NO, <next>.
<next> is go to Step <label>, APPROVE, DENY or ESCALATE. The last line is:
Rationale: <why the first question comes first>"""


@dataclass(frozen=True)
class Sample:
    """A policy with its prompt (the text of the user message), an optimal procedure, and corruptions of different
    kinds.
    """

    policy: Policy
    prompt: str
    procedure: Procedure
    corruptions: tuple[Corruption, ...]


@dataclass
class Scores:
    """Verdicts of all written procedures: the sound ones, and the corrupted ones by kind."""

    sound: list[Verdict] = field(default_factory=list)
    corrupted: dict[str, list[Verdict]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


@dataclass(frozen=True)
class WrittenDataset:
    """The written files with their numbers of rows, in order, and the scores of all rows."""

    files: dict[Path, int]
    scores: Scores


def samples(seed: int, counts: dict[str, int]) -> Iterator[tuple[str, Sample]]:
    """Yield `counts[split]` samples of each of `SPLITS` with their split. No policy occurs twice in or across splits.

    Policies count as the same if they decide the same questions of the same domain alike, in any wording. A split
    depends only on the seed and on the splits before it.
    """
    seen: set[str] = set()
    for split in SPLITS:
        drawn = number = 0
        while drawn < counts[split]:
            sample = _sample(random_stream("rationales", seed, split, number), seen)
            number += 1
            if sample is not None:
                drawn += 1
                yield split, sample


def prompt_text(policy: Policy, random: np.random.Generator) -> str:
    """Return the prompt: the policy in English, the questions to choose from, and the format of the answer."""
    questions = list(policy.questions)
    listed = "\n".join(f"- {questions[index].ask}" for index in random.permutation(len(questions)))
    return f"{describe(policy, random)}\n\nQuestions:\n{listed}\n\n{_INSTRUCTION}"


def write_dataset(out: Path, seed: int, counts: dict[str, int]) -> WrittenDataset:
    """Write the nine files under `out`, which may exist. The same seed, counts and pyarrow give the same bytes.

    Counts are 1 or more.

    Raises:
        RunError: a file cannot be written, or a sound procedure does not score exactly 1 (a bug).
    """
    try:
        out.mkdir(parents=True, exist_ok=True)  # fail before the work if the path is wrong
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
    rows: dict[str, list[dict[str, Any]]] = {f"{kind}_{split}": [] for kind in FOLDERS for split in SPLITS}
    scores = Scores()
    for split, sample in samples(seed, counts):
        policy, answer = sample.policy, write(sample.procedure)
        verdict = verify(answer, policy)
        if (verdict.factual_accuracy, verdict.logical_soundness, verdict.efficiency, verdict.reward) != (1, 1, 1, 1):
            raise RunError(f"a sound procedure on {policy.domain} scores {verdict}; please report {policy}")
        scores.sound.append(verdict)
        for worse in sample.corruptions:
            scores.corrupted[worse.kind].append(worse.verdict)
        common = {"domain": policy.domain, "policy": identity(policy), "label": policy.to_json()}
        question = {"role": "user", "content": sample.prompt}
        sound = [question, _answer(answer)]
        rows[f"sft_{split}"].append({"messages": sound, **common})
        rows[f"prompts_{split}"].append({"context_messages": [question], "completion": answer, **common})
        rows[f"preference_{split}"] += [
            {
                "chosen": sound,
                "rejected": [question, _answer(write(worse.procedure))],
                "corruption": worse.kind,
                "corrupted_step": worse.step,
                "rejected_reward": worse.verdict.reward,
                **common,
            }
            for worse in sample.corruptions
        ]
    files = {}
    for kind, folder in FOLDERS.items():
        for split in reversed(SPLITS):
            path = out / folder / f"rationales_{kind}_{split}.parquet"
            write_rows(path, rows[f"{kind}_{split}"])
            files[path] = len(rows[f"{kind}_{split}"])
    return WrittenDataset(files, scores)


FOLDERS = {"sft": "sft", "preference": "preferences", "prompts": "prompts"}
"""Kind of rows (part of the file name) -> folder."""


def _sample(random: np.random.Generator, seen: set[str]) -> Sample | None:
    """Return a sample and add its policy to `seen`; None if the policy was seen, has no optimal procedure of a suitable
    length, or has too few corruptions.
    """
    policy = draw_policy(random)
    name = identity(policy)
    if name in seen:
        return None
    procedure = best_procedure(policy)
    if not FEWEST_STEPS <= len(procedure.steps) <= MOST_STEPS:
        return None
    corruptions: list[Corruption] = []
    for index in random.permutation(len(KINDS)):
        worse = corrupt(procedure, policy, KINDS[index], random) if len(corruptions) < PAIRS_PER_POLICY else None
        corruptions += [worse] if worse is not None else []
    if len(corruptions) < PAIRS_PER_POLICY:
        return None
    seen.add(name)
    return Sample(policy, prompt_text(policy, random), procedure, tuple(corruptions))


def identity(policy: Policy) -> str:
    """Return 16 hexadecimal digits that are equal for policies that decide the same questions alike, in any wording."""
    order = sorted(range(len(policy.attributes)), key=lambda i: plain(policy.attributes[i].questions[0].ask))
    questions = [[plain(question.ask) for question in policy.attributes[i].questions] for i in order]
    table = sorted((tuple(case[i] for i in order), policy.decide(case)) for case in policy.cases)
    return blake2b(repr((policy.domain, questions, table)).encode(), digest_size=8).hexdigest()


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
