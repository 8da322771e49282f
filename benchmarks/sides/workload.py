"""What the engines are asked: chat prompts in groups, and answers of lognormal length."""

from dataclasses import asdict, dataclass
from typing import Any

from harness.data import ANSWERS, Lengths, answer_lengths, prompt_rows

PROMPTS = (60, 200)
"""Tokens of a prompt, uniformly."""


@dataclass(frozen=True)
class Job:
    """Requests for a side to answer, at most `in_flight` of them at a time, sampled at `temperature`."""

    prompts: list[list[int]]
    """Token ids."""
    lengths: list[int]
    """Tokens to sample for each; end tokens do not end an answer."""
    in_flight: int
    seed: int
    temperature: float = 1.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_job(
    tokenizer: Any,
    in_flight: int,
    requests: int,
    group: int,
    number: int,
    lengths: Lengths = ANSWERS,
    prompt: tuple[int, int] = PROMPTS,
) -> Job:
    """A job of `requests`, neighbours in groups of `group` sharing a prompt. Each `number` (below 0 too) has its own
    prompts, so that no cache holds them, and the same lengths in another order."""
    seed = (number + 1000) * 1000 + in_flight
    rows = prompt_rows(tokenizer, -(-requests // group), seed, *prompt)
    encoded = [
        list(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"])
        for row in rows
    ]
    prompts = [ids for ids in encoded for _ in range(group)][:requests]
    return Job(prompts, answer_lengths(number + 1000, requests, lengths, seed), in_flight, seed)


def first_token_job(tokenizer: Any, in_flight: int, group: int, number: int, prompt: tuple[int, int] = PROMPTS) -> Job:
    """A burst: `in_flight` requests that arrive together and want one token each."""
    once = Lengths(median=1, sigma=0.0, cap=1)
    return make_job(tokenizer, in_flight, in_flight, group, number + 500, once, prompt)
