"""Metrics of predictions that need a model: BERTScore, perplexity, and the reward of reward models.

BERTScore (Zhang et al. 2020, arXiv 1904.09675) works with any encoder that transformers loads. The tokens of prediction
and reference are unit vectors x_i, y_j from one layer of the encoder: P = mean_i max_j x_i . y_j,
R = mean_j max_i x_i . y_j, F1 = 2 P R / (P + R). As in the authors' program, the special tokens at both ends may be
matched but are not averaged over, there is no IDF weighting and no rescaling, and an empty text has P = R = F1 = 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from posttrain.data.messages import Message
from posttrain.data.rendering import Renderer, render_conversation
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction, Predictions, with_reference
from posttrain.evaluation.results import MetricResult, Results
from posttrain.evaluation.statistics import item_means, item_sums
from posttrain.recipe.model import ModelRecipe

_LAYERS = {("roberta", 24): 17, ("roberta", 12): 10, ("bert", 24): 18, ("bert", 12): 9, ("distilbert", 6): 5}
"""(encoder type, number of layers) -> the layer with the best human correlation in the authors' program."""
_UNLIMITED = 10**6
"""Tokenizers without a limit report a larger value."""


class Encoder:
    """Token vectors from one layer of an encoder."""

    def __init__(self, path: str, layer: int | None = None) -> None:
        """`layer` counts from 1; None takes the published layer of the encoder, else the one at three quarters.

        Raises `InputError` if `path` is not an encoder or lacks the layer.
        """
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        from posttrain.models.load import resolve_device, resolve_path

        logging.disable_progress_bar()
        self.path = path
        try:
            directory = resolve_path(path)
        except InputError as error:
            raise InputError(str(error).replace("model.path", "--encoder", 1)) from error
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
            self.model: Any = AutoModel.from_pretrained(directory).eval().to(resolve_device("auto"))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise InputError(
                f"--encoder {path} could not be loaded ({reason}); check that its files are complete"
            ) from error
        config = self.model.config
        layers = int(getattr(config, "num_hidden_layers", 0) or getattr(config, "num_layers", 0))
        self.layer = layer or _LAYERS.get((config.model_type, layers), -(-3 * layers // 4))
        if not 1 <= self.layer <= layers:
            raise InputError(f"--layer {self.layer}: {path} has {layers} layers; choose one from 1 to {layers}")
        self.limit = _limit(self.tokenizer, config)
        stack = getattr(getattr(self.model, "encoder", None), "layer", None)
        if stack is not None:
            self.model.encoder.layer = stack[: self.layer]  # later layers are not needed

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, float, float]]:
        """(P, R, F1) of each (prediction, reference) pair."""
        import torch

        texts = list(dict.fromkeys(text for pair in pairs for text in pair if text.strip()))
        vectors: dict[str, tuple[Any, Any]] = {}
        if texts:
            batch = self.tokenizer(
                texts,
                padding=True,
                truncation=True,
                max_length=self.limit,
                return_special_tokens_mask=True,
                return_tensors="pt",
            )
            special = batch.pop("special_tokens_mask")
            with torch.no_grad():
                states = self.model(**batch.to(self.model.device), output_hidden_states=True).hidden_states
            units = torch.nn.functional.normalize(states[self.layer].float(), dim=-1).cpu()
            present = batch["attention_mask"].bool().cpu()
            vectors = {
                text: (units[i][present[i]], ~special[i][present[i]].bool().cpu()) for i, text in enumerate(texts)
            }
        return [_bert_score(vectors.get(one), vectors.get(other)) for one, other in pairs]

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without truncation."""
        return [len(ids) for ids in self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]]


def bert_scores(rows: Sequence[Prediction], encoder: Encoder, tokens_per_batch: int = 8192) -> list[MetricResult]:
    """Mean precision, recall and F1 over prompts."""
    known, missing = with_reference(rows)
    lengths = encoder.tokens([text for row in known for text in (row.text, row.reference or "")])
    of_texts: dict[int, tuple[float, float, float]] = {}
    for group in _pair_batches([max(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True)], tokens_per_batch):
        scores = encoder.score([(known[i].text, known[i].reference or "") for i in group])
        of_texts |= dict(zip(group, scores, strict=True))
    about = {
        "encoder": encoder.path,
        "layer": encoder.layer,
        "token limit": encoder.limit,
        "share of texts truncated": sum(length > encoder.limit for length in lengths) / len(lengths),
        "empty predictions, scored 0": sum(not row.text.strip() for row in known),
    }
    return [
        MetricResult(
            f"bertscore_{name}",
            item_means("mean", ((row.item, of_texts[i][part]) for i, row in enumerate(known))),
            "higher",
            len(known),
            missing,
            about,
        )
        for part, name in enumerate(("precision", "recall", "f1"))
    ]


def _pair_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of pairs, sorted by length, in batches of at most `tokens` padded tokens (or one pair)."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and 2 * (len(group) + 1) * lengths[index] > tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _bert_score(prediction: tuple[Any, Any] | None, reference: tuple[Any, Any] | None) -> tuple[float, float, float]:
    if prediction is None or reference is None:
        return 0.0, 0.0, 0.0
    (x, x_counts), (y, y_counts) = prediction, reference
    if not x_counts.any() or not y_counts.any():
        return 0.0, 0.0, 0.0
    similarity = x @ y.T
    p = float(similarity.max(1).values[x_counts].mean())
    r = float(similarity.max(0).values[y_counts].mean())
    return p, r, 2 * p * r / (p + r) if p + r else 0.0


def _limit(tokenizer: Any, config: Any) -> int:
    """Most tokens per text: the smaller of the tokenizer's limit and the encoder's positions."""
    limit = getattr(tokenizer, "model_max_length", None) or _UNLIMITED
    positions = getattr(config, "max_position_embeddings", None) or _UNLIMITED
    if config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= 2  # their position ids start after that of the padding
    return int(min(limit, positions, _UNLIMITED))


_POSITIONS_PER_CHUNK = 512
Text = tuple[np.ndarray, np.ndarray]
"""(token ids [T] int64, scored mask [T] bool)."""


class LanguageModel:
    """A causal language model that scores texts."""

    def __init__(self, path: str, tokens_per_batch: int = 4096) -> None:
        """`tokens_per_batch`: most tokens per forward pass. Raises `InputError` if `path` is not a causal language model."""
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
        """(sum of -log p in nats over the scored tokens, number of scored tokens) of each text."""
        import torch

        of_texts: dict[int, tuple[float, int]] = {}
        for group in _text_batches([len(ids) for ids, _ in texts], self.tokens_per_batch):
            ids, scored = [texts[i][0] for i in group], [texts[i][1] for i in group]
            with torch.no_grad():
                logprobs = self.policy.score(ids, scored, 1.0, _POSITIONS_PER_CHUNK).logprobs
            ends = np.cumsum([int(mask.sum()) for mask in scored])[:-1]
            parts = np.split(logprobs.double().cpu().numpy(), ends)
            of_texts |= {i: (-float(part.sum()), len(part)) for i, part in zip(group, parts, strict=True)}
        return [of_texts[i] for i in range(len(texts))]

    def answer(self, row: Prediction, text: str, cut_off: bool) -> Text:
        """`text` as the answer to the prompt of the row, with the end token unless it was cut off."""
        messages = [*(row.prompt or []), {"role": "assistant", "content": text}]
        stream = render_conversation(self.renderer, messages, "last_assistant")[-1]
        stream = stream.cut(len(stream.ids) - 1) if cut_off else stream
        return stream.ids, stream.trained

    def unprompted(self, text: str) -> tuple[Text, bool]:
        """`text` after the BOS token (if the model has one), and whether it was truncated to the context of the model."""
        first = self.policy.tokenizer.bos_token_id
        ids = ([] if first is None else [first]) + self.renderer.encode(text)
        scored = np.arange(len(ids)) > 0
        return (np.array(ids[: self.limit], dtype=np.int64), scored[: self.limit]), len(ids) > self.limit


def conditional(
    rows: Sequence[Prediction], model: LanguageModel, of: Literal["reference", "prediction"]
) -> MetricResult:
    """exp(sum of nats / sum of tokens) of the references or the predictions, given their prompts.

    The end token of the answer is included. A reference shared by several samples is scored once.
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
        rendered = None if reason else model.answer(row, text, row.cut_off and of == "prediction")
        if rendered is not None and len(rendered[0]) > model.limit:
            reason = "too long for the model"
        if reason or rendered is None or not rendered[1].any():
            left_out[reason or f"empty {of}"] = left_out.get(reason or f"empty {of}", 0) + 1
            continue
        texts.append(rendered)
        items.append(row.item)
    name = f"perplexity_{of}"
    counted = _finite(model.nats(texts), items, left_out, name)
    scores = item_sums("perplexity", counted)
    tokens = int(sum(count for _, (_, count) in counted))
    return MetricResult(name, scores, "lower", len(counted), left_out, {"model": model.path, "tokens": tokens})


def unconditional(rows: Sequence[Prediction], model: LanguageModel) -> MetricResult:
    """Arithmetic mean over references of exp(nats / tokens), without prompts.

    Provided for comparison with published numbers. It does not depend on the predictions, and a few unlikely texts
    dominate the mean.
    """
    distinct = dict.fromkeys((row.item, row.reference) for row in rows if row.reference is not None)
    texts = [(item, *model.unprompted(text)) for item, text in distinct]
    usable = [(item, text, cut) for item, text, cut in texts if text[1].any()]
    left_out = {"shorter than two tokens": len(texts) - len(usable)} if len(usable) < len(texts) else {}
    if missing := sum(row.reference is None for row in rows):
        left_out["no reference"] = missing
    name = "perplexity_unconditional"
    counted = _finite(model.nats([text for _, text, _ in usable]), [item for item, _, _ in usable], left_out, name)
    scores = item_means("mean", ((item, math.exp(nats / count)) for item, (nats, count) in counted))
    about = {"model": model.path, "share of texts truncated": sum(cut for *_, cut in usable) / len(usable)}
    return MetricResult(name, scores, "lower", len(counted), left_out, about)


def _finite(
    nats: Sequence[tuple[float, int]], items: Sequence[str], left_out: dict[str, int], name: str
) -> list[tuple[str, tuple[float, int]]]:
    counted = [(item, text) for item, text in zip(items, nats, strict=True) if math.isfinite(text[0])]
    if len(counted) < len(nats):
        left_out["not a finite number"] = len(nats) - len(counted)
    if not counted:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "there are no rows"
        raise InputError(f"{name}: no text could be scored ({reasons}); add the missing fields to the rows")
    return counted


def _text_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of texts in order, in batches of at most `tokens` tokens (or one text)."""
    group: list[int] = []
    total = 0
    for index, length in enumerate(lengths):
        if group and total + length > tokens:
            yield group
            group, total = [], 0
        group.append(index)
        total += length
    if group:
        yield group


class Rewards(Protocol):
    """A reward model."""

    statistics: tuple[float, float] | None
    """(mean, standard deviation) of its rewards; None if unknown."""

    def scores(self, conversations: Sequence[list[Message]], cut_off: Sequence[bool]) -> list[float]: ...


def evaluate_rewards(
    predictions: Predictions,
    models: Sequence[str],
    load: Callable[[str], Rewards],
    progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """Mean (reward - mean) / standard deviation of the predictions under each reward model; `load` opens a path.

    Mean and standard deviation are stored with the reward model; without them, rewards are raw and named `raw_...`.
    Models that fail are in `Results.failed`; the others are still evaluated.
    """
    results = Results(
        predictions.path,
        len(predictions.rows),
        predictions.items,
        predictions.warnings(),
        digests=predictions.digests(),
    )
    for name, path in zip(_metric_names(models), models, strict=True):
        progress(path)
        try:
            results.metrics.append(_mean_reward(name, path, predictions, load(path)))
        except InputError as error:
            results.failed[path] = str(error)
    return results


def _mean_reward(name: str, path: str, predictions: Predictions, model: Rewards) -> MetricResult:
    left_out: dict[str, int] = {}
    usable = []
    for row in predictions.rows:
        reason = "no prompt" if row.prompt is None else None if row.text.strip() else "empty prediction"
        if reason is None:
            usable.append(row)
        else:
            left_out[reason] = left_out.get(reason, 0) + 1
    conversations = [[*(row.prompt or []), {"role": "assistant", "content": row.text}] for row in usable]
    raw = model.scores(conversations, [row.cut_off for row in usable]) if usable else []
    mean, std = model.statistics or (0.0, 1.0)
    values = [(row.item, (r - mean) / std) for row, r in zip(usable, raw, strict=True) if math.isfinite(r)]
    if len(values) < len(raw):
        left_out["reward is not a finite number"] = len(raw) - len(values)
    if not values:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise InputError(f"{path}: no prediction could be scored ({reasons}); add the missing fields to the rows")
    finite = [reward for reward in raw if math.isfinite(reward)]
    about = {"model": path, "mean of raw rewards": math.fsum(finite) / len(finite)}
    if model.statistics is None:
        title, about["normalized"] = f"raw_{name}", "no: the model has no stored reward statistics"
    else:
        title, about["normalized"] = name, f"(r - {mean:.4g}) / {std:.4g}, stored with the model"
    return MetricResult(title, item_means("mean", values), "higher", len(values), left_out, about)


def _metric_names(models: Sequence[str]) -> list[str]:
    """`reward` for one model; for several, `reward/` and the distinguishing part of the path."""
    if len(set(models)) < len(models):
        raise InputError(f"--model {max(models, key=list(models).count)} is given twice; give every reward model once")
    if len(models) == 1:
        return ["reward"]
    parts = [list(Path(model).parts) for model in models]
    # A run stores its model in `model`, so strip common components at both ends.
    for end in (-1, 0):
        while min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1:
            for part in parts:
                del part[end]
    return [f"reward/{'/'.join(part)}" for part in parts]
