"""Whether the fast ways compute the right thing on this device."""

from collections.abc import Iterator

import numpy as np
import torch

from accelerator.decoding import all_answers, answers, engine_of, random_prompts
from accelerator.reinforcement import answer_sample
from accelerator.rows import Row
from accelerator.shapes import RandomPolicy, Shape, random_model
from accelerator.training import Setting, Training
from posttrain.models.forward import logits_of, token_scores
from posttrain.models.layers import Heads, RowSegment
from posttrain.models.packing import PackedLayout
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.training.objectives import logprobs

SEGMENTS = [
    *(RowSegment(0, 70), RowSegment(70, 200, ((0, 70),)), RowSegment(200, 264, ((0, 150),))),
    *(RowSegment(264, 269, ((0, 150), (200, 230))), RowSegment(269, 502), RowSegment(502, 558)),
    *(RowSegment(558, 599, ((502, 518),)), RowSegment(599, 856)),
]
"""Streams of which some share a beginning, twice over."""


def parity(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Largest distance from the plain way in float32, relative to the largest value; and greedy tokens in common."""
    for size in (64, 128):
        yield from _attention(device, size, window=None)
        yield from _attention(device, size, window=50)
    yield from _scores(shape, device)
    yield from _greedy(shape, device)
    yield from _many_lengths(shape, device)


def _attention(device: torch.device, size: int, window: int | None) -> Iterator[Row]:
    tokens = SEGMENTS[-1].stop
    generator = torch.Generator().manual_seed(0)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    *rows, weights = (torch.randn(heads, tokens, size, generator=generator).to(device, half) for heads in (8, 2, 2, 8))
    found = _with_gradients(rows, weights)(PackedLayout(SEGMENTS), window)
    expected = _with_gradients([row.float() for row in rows], weights.float())(PackedLayout(SEGMENTS), window)
    distances = [relative(mine, theirs) for mine, theirs in zip(found, expected, strict=True)]
    names = ("output", "query", "key", "value")
    note = ", ".join(f"{name} {distance:.1e}" for name, distance in zip(names, distances, strict=True))
    case = f"packed attention and its gradients, heads of {size}" + (f", window {window}" if window else "")
    yield Row("parity", case, max(distances), "relative", note=note)


def _with_gradients(rows, weights):
    def attend(layout: PackedLayout, window: int | None) -> list[torch.Tensor]:
        leaves = [row.detach().clone().requires_grad_() for row in rows]
        out = layout.attend(0, Heads(*leaves, 0.125, window))
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

    return attend


def relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest distance over the largest value."""
    return float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-30))


def _scores(shape: Shape, device: torch.device) -> Iterator[Row]:
    model = RandomPolicy(shape, device).model
    hidden = torch.randn(300, shape.hidden, device=device, dtype=next(model.parameters()).dtype)
    targets = torch.randint(3, shape.vocabulary, (300,), device=device)
    found = []
    for chunked in (True, False):
        leaf = hidden.clone().requires_grad_()
        if chunked:
            scores = token_scores(model, leaf, targets, 0.7, 64)
            values, entropies = scores.logprobs, scores.entropies
        else:
            logprobs = torch.log_softmax(logits_of(model, leaf) / 0.7, dim=-1)
            values, entropies = logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
        (gradient,) = torch.autograd.grad((values + 0.1 * entropies).sum(), leaf)
        found.append([values.detach(), entropies.detach(), gradient])
    distances = [relative(mine, theirs) for mine, theirs in zip(*found, strict=True)]
    note = ", ".join(f"{n} {d:.1e}" for n, d in zip(("log-probability", "entropy", "gradient"), distances, strict=True))
    yield Row("parity", "log-probabilities in chunks", max(distances), "relative", note=note)


def _greedy(shape: Shape, device: torch.device) -> Iterator[Row]:
    """In bfloat16 two ways of rounding part at the first near tie, so a share below 1 is no error there."""
    policy = RandomPolicy(shape, device)
    prompts = random_prompts(4, 24, shape.vocabulary, "greedy")
    mine = answers(engine_of(policy, 4), prompts, 16, SamplingRecipe(temperature=0.0), "greedy")
    model = random_model(shape, device, packed=False)
    ids = torch.tensor(prompts, device=device)
    with torch.no_grad():
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16, do_sample=False,
            pad_token_id=0,
        )[:, 24:].tolist()  # fmt: skip
    same = [a == b for one, other in zip(mine, theirs, strict=True) for a, b in zip(one.ids, other, strict=True)]
    yield Row("parity", f"greedy tokens as transformers', {shape.name}", 100 * sum(same) / len(same), "%")


def _many_lengths(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Answers of many lengths: the number of sequences falls while they are decoded, and the cache grows."""
    training = Training(shape, device, Setting(1024))
    (prompt,) = random_prompts(1, 150, shape.vocabulary, "lengths")
    lengths = [(prompt[: 10 + 6 * i], 12 + 8 * ((i * 7) % 24)) for i in range(24)]
    found = all_answers(engine_of(training.policy, 24), lengths, SamplingRecipe(), "lengths")
    samples = [
        answer_sample(asked, answer, 0, i) for i, ((asked, _), answer) in enumerate(zip(lengths, found, strict=True))
    ]
    apart = [
        np.abs(scored - np.array(answer.logprobs)).mean()
        for scored, answer in zip(logprobs(training.learner, samples), found, strict=True)
    ]
    yield Row("parity", f"learner against engine, {shape.name}, the worst of 24 answers", float(max(apart)), "nats")
