"""Metrics of predictions that need a model: BERTScore, perplexity, and the reward of reward models.

BERTScore (Zhang et al. 2020, arXiv 1904.09675) works with any encoder that transformers loads. The tokens of prediction
and reference are unit vectors x_i, y_j from one layer of the encoder: P = mean_i max_j x_i . y_j,
R = mean_j max_i x_i . y_j, F1 = 2 P R / (P + R). As in the authors' program, the special tokens at both ends may be
matched but are not averaged over, there is no IDF weighting and no rescaling, and an empty text has P = R = F1 = 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from posttrain.data.messages import Message
from posttrain.data.rendering import Renderer, render_conversation
from posttrain.errors import InputError, naming
from posttrain.evaluation.predictions import Prediction, Predictions, with_reference
from posttrain.evaluation.results import MetricResult, Results
from posttrain.evaluation.statistics import item_means, item_sums
from posttrain.evaluation.workers import ModelOptions, ModelWorkers
from posttrain.recipe.model import ModelRecipe

_LAYERS = {("roberta", 24): 17, ("roberta", 12): 10, ("bert", 24): 18, ("bert", 12): 9, ("distilbert", 6): 5}
"""(encoder type, number of layers) -> the layer with the best human correlation in the authors' program."""
_UNLIMITED = 10**6
"""Tokenizers without a limit report a larger value."""


class Encoder:
    """Token vectors from one layer of an encoder."""

    def __init__(self, path: str, layer: int | None = None, options: ModelOptions | None = None) -> None:
        """`layer` counts from 1; None selects the published layer of the encoder, or else the layer at three quarters.

        Raises `InputError` if `path` is not an encoder or lacks the layer.
        """
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        from posttrain.models.load import resolve_device, resolve_dtype, resolve_path

        options = options or ModelOptions()
        logging.disable_progress_bar()
        self.tokens_per_batch = options.tokens_per_batch
        with naming(path="--encoder", device="--device"):
            device, directory = resolve_device(options.device), resolve_path(path)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
            dtype = resolve_dtype(options.dtype, device)
            model = AutoModel.from_pretrained(directory, dtype=dtype, trust_remote_code=False, use_safetensors=True)
            self.model: Any = model.eval().to(device)
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
        positions = getattr(config, "max_position_embeddings", None) or _UNLIMITED
        if config.model_type in ("roberta", "xlm-roberta", "camembert"):
            positions -= 2  # their position ids start after that of the padding
        self.limit = int(min(getattr(self.tokenizer, "model_max_length", None) or _UNLIMITED, positions, _UNLIMITED))
        self.about = {"encoder": path, "layer": self.layer, "token limit": self.limit, "dtype": _dtype(self.model)}
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

    def score_all(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[tuple[float, float, float], int]]:
        """(P, R, F1) of each pair, and the number of its two texts that are truncated."""
        texts = [text for pair in pairs for text in pair]
        lengths = [len(ids) for ids in self.tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
        pair_lengths = list(zip(lengths[::2], lengths[1::2], strict=True))
        scores: dict[int, tuple[float, float, float]] = {}
        for group in _batches([max(pair) for pair in pair_lengths], self.tokens_per_batch // 2, padded=True):
            scores |= dict(zip(group, self.score([pairs[i] for i in group]), strict=True))
        truncated = [sum(length > self.limit for length in pair) for pair in pair_lengths]
        return [(scores[i], count) for i, count in enumerate(truncated)]


def bert_scores(rows: Sequence[Prediction], encoder: ModelWorkers[Encoder]) -> list[MetricResult]:
    """Mean precision, recall and F1 over prompts."""
    known, missing = with_reference(rows)
    scored = encoder.map(Encoder.score_all, [(row.text, row.reference or "") for row in known])
    about = {
        **encoder.map(attribute, ["about"])[0],
        "share of texts truncated": sum(truncated for _, truncated in scored) / (2 * len(scored)),
        "empty predictions, scored 0": sum(not row.text.strip() for row in known),
    }
    return [
        MetricResult(
            f"bertscore_{name}",
            item_means("mean", ((row.item, scored[i][0][part]) for i, row in enumerate(known))),
            "higher",
            len(known),
            missing,
            about,
        )
        for part, name in enumerate(("precision", "recall", "f1"))
    ]


def attribute(model: Any, names: Sequence[str]) -> list[Any]:
    """The attributes of the model with these names, for `ModelWorkers.map`."""
    return [getattr(model, name) for name in names]


def _batches(lengths: Sequence[int], tokens: int, padded: bool) -> Iterator[list[int]]:
    """Indices of texts in batches of at most `tokens` tokens (or one text): in order, or `padded` and sorted by length."""
    group: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]) if padded else range(len(lengths)):
        total = (len(group) + 1) * lengths[index] if padded else total + lengths[index]
        if group and total > tokens:
            yield group
            group, total = [], lengths[index]
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


_POSITIONS_PER_CHUNK = 512
Text = tuple[np.ndarray, np.ndarray]
"""(token ids [T] int64, scored mask [T] bool)."""
Nats = tuple[float, int]
"""(sum of -log p in nats over the scored tokens, number of scored tokens)."""


class LanguageModel:
    """A causal language model that scores texts."""

    def __init__(self, path: str, options: ModelOptions | None = None) -> None:
        """Raises `InputError` if `path` is not a causal language model."""
        from posttrain.models.forward import transformer
        from posttrain.models.policy import Policy

        options = options or ModelOptions()
        with naming(path="--model", device="--device"):
            self.policy: Policy = Policy(ModelRecipe(path=path, dtype=options.dtype, device=options.device))
        self.tokens_per_batch = options.tokens_per_batch
        self.about = {"model": path, "dtype": _dtype(self.policy.model)}
        self.renderer = Renderer(self.policy.tokenizer, self.policy.end_tokens)
        config: Any = transformer(self.policy.model).config
        self.limit: int = getattr(config, "max_position_embeddings", None) or 10**9

    def nats(self, texts: Sequence[Text]) -> list[Nats]:
        """The nats of each text."""
        import torch

        nats: dict[int, Nats] = {}
        for group in _batches([len(ids) for ids, _ in texts], self.tokens_per_batch, padded=False):
            ids, scored = [texts[i][0] for i in group], [texts[i][1] for i in group]
            with torch.no_grad():
                logprobs = self.policy.score(ids, scored, 1.0, _POSITIONS_PER_CHUNK).logprobs
            ends = np.cumsum([int(mask.sum()) for mask in scored])[:-1]
            parts = np.split(logprobs.double().cpu().numpy(), ends)
            nats |= {i: (-float(part.sum()), len(part)) for i, part in zip(group, parts, strict=True)}
        return [nats[i] for i in range(len(texts))]

    def score_answers(self, answers: Sequence["Answer"]) -> list[Nats | str]:
        """Nats and number of tokens of each answer given its prompt, or the reason why it has no score."""
        texts = []
        for prompt, text, cut_off in answers:
            messages = [*prompt, {"role": "assistant", "content": text}]
            stream = render_conversation(self.renderer, messages, "last_assistant")[-1]
            stream = stream.cut(len(stream.ids) - 1) if cut_off else stream  # without the end token
            texts.append((stream.ids, stream.trained))
        lengths = [0 if not scored.any() else len(ids) for ids, scored in texts]
        usable = [i for i, length in enumerate(lengths) if 0 < length <= self.limit]
        nats_of = dict(zip(usable, self.nats([texts[i] for i in usable]), strict=True))
        return [nats_of.get(i, "too long for the model" if length else "") for i, length in enumerate(lengths)]


Answer = tuple[list[Message], str, bool]
"""(prompt, answer, whether it is truncated)."""


def conditional(
    rows: Sequence[Prediction], model: ModelWorkers[LanguageModel], of: Literal["reference", "prediction"]
) -> MetricResult:
    """exp(sum of nats / sum of tokens) of the references or the predictions, given their prompts.

    The end token of the answer is included. A reference shared by several samples is scored once.
    """
    left_out = Counter[str]()
    answers: list[Answer] = []
    items: list[str] = []
    seen: set[tuple[str, str]] = set()
    for row in rows:
        text = (row.reference or "") if of == "reference" else row.text
        if of == "reference" and (row.item, text) in seen:
            continue
        seen.add((row.item, text))
        if row.prompt is None or not text.strip():
            left_out["no prompt" if row.prompt is None else f"empty {of}"] += 1
            continue
        answers.append((row.prompt, text, row.cut_off and of == "prediction"))
        items.append(row.item)
    name = f"perplexity_{of}"
    nats: list[tuple[str, Nats]] = []
    for item, score in zip(items, model.map(LanguageModel.score_answers, answers), strict=True):
        if isinstance(score, str):
            left_out[score or f"empty {of}"] += 1
        else:
            nats.append((item, score))
    counted = [(item, text) for item, text in nats if math.isfinite(text[0])]
    if len(counted) < len(nats):
        left_out["not a finite number"] = len(nats) - len(counted)
    if not counted:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "there are no rows"
        raise InputError(f"{name}: no text could be scored ({reasons}); add the missing fields to the rows")
    scores = item_sums("perplexity", counted)
    tokens = int(sum(count for _, (_, count) in counted))
    about = {**model.map(attribute, ["about"])[0], "tokens": tokens}
    return MetricResult(name, scores, "lower", len(counted), left_out, about)


def _dtype(model: Any) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


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
    processes: int = 1,
) -> Results:
    """Mean (reward - mean) / standard deviation of the predictions under each reward model; `load` opens a path.

    Mean and standard deviation are those stored with the reward model; without them, rewards are raw and named
    `raw_...`. Models that fail are in `Results.failed`; the others are still evaluated. `load` is pickled if there are
    several processes.
    """
    results = predictions.results()
    for name, path in zip(_metric_names(models), models, strict=True):
        progress(path)
        with ModelWorkers(partial(load, path), processes) as model:
            try:
                results.metrics.append(_mean_reward(name, path, predictions, model))
            except InputError as error:
                results.failed[path] = str(error)
    return results


def _mean_reward(name: str, path: str, predictions: Predictions, model: ModelWorkers[Rewards]) -> MetricResult:
    left_out = Counter[str]()
    usable: list[tuple[str, tuple[list[Message], bool]]] = []
    for row in predictions.rows:
        if row.prompt is None or not row.text.strip():
            left_out["no prompt" if row.prompt is None else "empty prediction"] += 1
        else:
            usable.append((row.item, ([*row.prompt, {"role": "assistant", "content": row.text}], row.cut_off)))
    rewards = model.map(_raw_rewards, [answer for _, answer in usable]) if usable else []
    raw = [(item, reward) for (item, _), reward in zip(usable, rewards, strict=True) if math.isfinite(reward)]
    if len(raw) < len(usable):
        left_out["reward is not a finite number"] = len(usable) - len(raw)
    if not raw:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise InputError(f"{path}: no prediction could be scored ({reasons}); add the missing fields to the rows")
    statistics = model.map(attribute, ["statistics"])[0]
    mean, std = statistics or (0.0, 1.0)
    about = {"model": path, "mean of raw rewards": math.fsum(reward for _, reward in raw) / len(raw)}
    if statistics is None:
        title, about["normalized"] = f"raw_{name}", "no: the model has no stored reward statistics"
    else:
        title, about["normalized"] = name, f"(r - {mean:.4g}) / {std:.4g}, stored with the model"
    scores = item_means("mean", ((item, (reward - mean) / std) for item, reward in raw))
    return MetricResult(title, scores, "higher", len(raw), left_out, about)


def _raw_rewards(model: Rewards, answers: list[tuple[list[Message], bool]]) -> list[float]:
    return model.scores([messages for messages, _ in answers], [cut_off for _, cut_off in answers])


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
