"""BERTScore (Zhang et al. 2020, arXiv 1904.09675) with any encoder that transformers loads.

Tokens of the prediction and of the reference are vectors x_i, y_j of unit length, from one layer of the encoder:
P = mean_i max_j x_i . y_j, R = mean_j max_i x_i . y_j, F1 = 2 P R / (P + R). As in the authors' program, the special
tokens at both ends may be matched but are not averaged over, there is no weighting by rarity and no rescaling, and an
empty text has P = R = F1 = 0.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction
from posttrain.evaluation.scores import item_means
from posttrain.evaluation.text_metrics import Measured, with_reference

_LAYERS = {("roberta", 24): 17, ("roberta", 12): 10, ("bert", 24): 18, ("bert", 12): 9, ("distilbert", 6): 5}
"""The layers that agreed best with people's judgements in the authors' program: (kind of encoder, layers) -> layer."""
_UNLIMITED = 10**6
"""What tokenizers without a limit say is larger."""


class Encoder:
    """Vectors of tokens from one layer of an encoder."""

    def __init__(self, path: str, layer: int | None = None) -> None:
        """`layer` counts from 1, and None takes the one published for such an encoder, else three quarters up.

        InputError where there is no encoder at `path`, or no such layer in it.
        """
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        from posttrain.models.load import resolve_device, resolve_path

        logging.disable_progress_bar()
        self.path = path
        try:
            found = resolve_path(path)
        except InputError as error:
            raise InputError(str(error).replace("model.path", "--encoder", 1)) from error
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(found)
            self.model: Any = AutoModel.from_pretrained(found).eval().to(resolve_device("auto"))
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise InputError(
                f"--encoder {path} could not be loaded ({said}); check that its files are whole"
            ) from error
        config = self.model.config
        layers = int(getattr(config, "num_hidden_layers", 0) or getattr(config, "num_layers", 0))
        self.layer = layer or _LAYERS.get((config.model_type, layers), -(-3 * layers // 4))
        if not 1 <= self.layer <= layers:
            raise InputError(f"--layer {self.layer}: {path} has {layers} layers; choose one from 1 to {layers}")
        self.limit = _limit(self.tokenizer, config)
        stack = getattr(getattr(self.model, "encoder", None), "layer", None)
        if stack is not None:
            self.model.encoder.layer = stack[: self.layer]  # nothing reads what comes after

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, float, float]]:
        """P, R and F1 of each (prediction, reference)."""
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
        return [_matched(vectors.get(one), vectors.get(other)) for one, other in pairs]

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has, without any limit."""
        return [len(ids) for ids in self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]]


def bert_scores(rows: Sequence[Prediction], encoder: Encoder, tokens_per_batch: int = 8192) -> list[Measured]:
    """Precision, recall and F1, each a mean over prompts."""
    known, missing = with_reference(rows)
    lengths = encoder.tokens([text for row in known for text in (row.text, row.reference or "")])
    found: dict[int, tuple[float, float, float]] = {}
    for group in _groups([max(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True)], tokens_per_batch):
        scores = encoder.score([(known[i].text, known[i].reference or "") for i in group])
        found |= dict(zip(group, scores, strict=True))
    about = {
        "encoder": encoder.path,
        "layer": encoder.layer,
        "token limit": encoder.limit,
        "share of texts truncated": sum(length > encoder.limit for length in lengths) / len(lengths),
        "empty predictions, scored 0": sum(not row.text.strip() for row in known),
    }
    return [
        Measured(
            f"bertscore_{name}",
            item_means("mean", ((row.item, found[i][place]) for i, row in enumerate(known))),
            "higher",
            len(known),
            missing,
            about,
        )
        for place, name in enumerate(("precision", "recall", "f1"))
    ]


def _groups(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Pairs of about the same length together, at most `tokens` tokens with padding in each group or one pair."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and 2 * (len(group) + 1) * lengths[place] > tokens:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _matched(prediction: tuple[Any, Any] | None, reference: tuple[Any, Any] | None) -> tuple[float, float, float]:
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
    """Most tokens of a text: the tokenizer's limit, or the positions that the encoder knows."""
    said = getattr(tokenizer, "model_max_length", None) or _UNLIMITED
    positions = getattr(config, "max_position_embeddings", None) or _UNLIMITED
    if config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= 2  # their positions begin after the padding's
    return int(min(said, positions, _UNLIMITED))
