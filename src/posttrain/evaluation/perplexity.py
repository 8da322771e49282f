"""Perplexity of texts under a causal language model: given their prompts, and without them as once published."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from posttrain.data.rendering import Renderer, render_conversation
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction
from posttrain.evaluation.scores import item_means, item_sums
from posttrain.evaluation.text_metrics import Measured
from posttrain.recipe.model import ModelRecipe

_POSITIONS_PER_CHUNK = 512
Text = tuple[np.ndarray, np.ndarray]
"""Token ids [T] int64, and which of them are scored [T] bool."""


class LanguageModel:
    """A causal language model that says how likely texts are."""

    def __init__(self, path: str, tokens_per_batch: int = 4096) -> None:
        """InputError where `path` holds none. `tokens_per_batch`: most tokens of one forward pass."""
        from posttrain.models.forward import transformer
        from posttrain.models.policy import Policy

        try:
            self.policy: Policy = Policy(ModelRecipe(path=path))
        except InputError as error:
            raise InputError(str(error).replace("model.path", "--model", 1)) from error
        self.path, self.tokens_per_batch = path, tokens_per_batch
        self.renderer = Renderer(self.policy.tokenizer, self.policy.end_tokens)
        config: Any = transformer(self.policy.model).config
        self.limit: int = getattr(config, "max_position_embeddings", None) or 10**9

    def nats(self, texts: Sequence[Text]) -> list[tuple[float, int]]:
        """-log p in nats of the scored tokens of each text, and how many they are."""
        import torch

        found: dict[int, tuple[float, int]] = {}
        for group in _groups([len(ids) for ids, _ in texts], self.tokens_per_batch):
            ids, scored = [texts[i][0] for i in group], [texts[i][1] for i in group]
            with torch.no_grad():
                logprobs = self.policy.score(ids, scored, 1.0, _POSITIONS_PER_CHUNK).logprobs
            ends = np.cumsum([int(mask.sum()) for mask in scored])[:-1]
            parts = np.split(logprobs.double().cpu().numpy(), ends)
            found |= {i: (-float(part.sum()), len(part)) for i, part in zip(group, parts, strict=True)}
        return [found[i] for i in range(len(texts))]

    def answer(self, row: Prediction, text: str, cut_off: bool) -> Text:
        """`text` as the answer to the row's prompt, with its end token unless it was cut off."""
        messages = [*(row.prompt or []), {"role": "assistant", "content": text}]
        stream = render_conversation(self.renderer, messages, "last_assistant")[-1]
        stream = stream.cut(len(stream.ids) - 1) if cut_off else stream
        return stream.ids, stream.trained

    def alone(self, text: str) -> tuple[Text, bool]:
        """`text` after the model's first token if it has one, and whether it was cut to what the model can read."""
        first = self.policy.tokenizer.bos_token_id
        ids = ([] if first is None else [first]) + self.renderer.encode(text)
        scored = np.arange(len(ids)) > 0
        return (np.array(ids[: self.limit], dtype=np.int64), scored[: self.limit]), len(ids) > self.limit


def conditional(rows: Sequence[Prediction], model: LanguageModel, of: Literal["reference", "prediction"]) -> Measured:
    """exp(sum of nats / sum of tokens) of the references, or of the predictions, given their prompts.

    The answer's end token is one of the tokens. A reference that several samples share is scored once.
    """
    left_out: dict[str, int] = {}
    texts: list[Text] = []
    items: list[str] = []
    seen: set[tuple[str, str]] = set()
    for row in rows:
        text = (row.reference or "") if of == "reference" else row.text
        if of == "reference" and (row.item, text) in seen:
            continue
        seen.add((row.item, text))
        reason = "no prompt" if row.prompt is None else None if text.strip() else f"empty {of}"
        made = None if reason else model.answer(row, text, row.cut_off and of == "prediction")
        if made is not None and len(made[0]) > model.limit:
            reason = "too long for the model"
        if reason or made is None or not made[1].any():
            left_out[reason or f"empty {of}"] = left_out.get(reason or f"empty {of}", 0) + 1
            continue
        texts.append(made)
        items.append(row.item)
    name = f"perplexity_{of}"
    counted = _finite(model.nats(texts), items, left_out, name)
    scores = item_sums("perplexity", counted)
    tokens = int(sum(count for _, (_, count) in counted))
    return Measured(name, scores, "lower", len(counted), left_out, {"model": model.path, "tokens": tokens})


def unconditional(rows: Sequence[Prediction], model: LanguageModel) -> Measured:
    """The mean over references of exp(nats / tokens) without their prompts, as published with the rationales.

    It says nothing about the predictions, and a few unlikely texts make most of an arithmetic mean of perplexities;
    it is here to be compared with published numbers.
    """
    distinct = dict.fromkeys((row.item, row.reference) for row in rows if row.reference is not None)
    made = [(item, *model.alone(text)) for item, text in distinct]
    usable = [(item, text, cut) for item, text, cut in made if text[1].any()]
    left_out = {"shorter than two tokens": len(made) - len(usable)} if len(usable) < len(made) else {}
    if missing := sum(row.reference is None for row in rows):
        left_out["no reference"] = missing
    name = "perplexity_unconditional"
    counted = _finite(model.nats([text for _, text, _ in usable]), [item for item, _, _ in usable], left_out, name)
    scores = item_means("mean", ((item, math.exp(nats / count)) for item, (nats, count) in counted))
    about = {"model": model.path, "share of texts truncated": sum(cut for *_, cut in usable) / len(usable)}
    return Measured(name, scores, "lower", len(counted), left_out, about)


def _finite(
    nats: Sequence[tuple[float, int]], items: Sequence[str], left_out: dict[str, int], name: str
) -> list[tuple[str, tuple[float, int]]]:
    counted = [(item, own) for item, own in zip(items, nats, strict=True) if math.isfinite(own[0])]
    if len(counted) < len(nats):
        left_out["not a finite number"] = len(nats) - len(counted)
    if not counted:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "there are no rows"
        raise InputError(f"{name}: no text could be scored ({reasons}); give rows with what is missing")
    return counted


def _groups(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Texts in their order, at most `tokens` tokens in each group or one text."""
    group: list[int] = []
    total = 0
    for place, length in enumerate(lengths):
        if group and total + length > tokens:
            yield group
            group, total = [], 0
        group.append(place)
        total += length
    if group:
        yield group
