"""Every causal language model of the installed transformers: how posttrain computes it, and how exactly.

    python benchmarks/families.py [--out docs/reference/families.md] [type ...]

makes a tiny random model of each type (`harness/tiny_families.py`), loads it as a policy, samples two turns of three conversations of
different lengths with the local engine, and scores them. A row of the table has the path that the exactness gate chose, and
the largest distances in nats per token: of streams packed in one row from each alone, of streams from transformers' own
forward pass, and of the engine's log-probabilities from the learner's. Types that read images (the plug-in `posttrain-images`) play
two turns with none to three images of different sizes, and have a table of their own.
"""

import argparse
import asyncio
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.tiny_families import SPECIAL_IDS, UNBUILDABLE, model_types, save_tiny

import posttrain
from posttrain.engines.protocol import Request
from posttrain.errors import InputError
from posttrain.models.forward import path_of
from posttrain.plugins import entry_points
from posttrain.recipe.rollout import SamplingRecipe

VOCABULARY = 320
LIMIT = 1e-3
"""Largest distance of a row that is not wrong, in nats per token."""
PROMPTS, TOKENS = (9, 22, 45), 24
"""Tokens of the prompts and of each answer."""


@dataclass(frozen=True)
class Row:
    """One model type in the table. Distances are in nats per token, None where the model is refused."""

    type: str
    path: str
    engine: str = ""
    alone: float | None = None
    own: float | None = None
    sampled: float | None = None
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the model is accepted and not exact, or ends in an error that is not a sentence."""
        distances = (self.alone, self.own, self.sampled)
        return self.path == "error" or any(value is not None and not value <= LIMIT for value in distances)


def tokenizer_of(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of single characters. Some types add tokens of their own, so it has fewer than `vocabulary`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", *(chr(0x4E00 + index) for index in range(vocabulary - 13))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
    return fast


def sampled_streams(engine: posttrain.LocalEngine) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Ids and masks of streams of one and of two turns, and the engine's log-probabilities of the sampled tokens."""
    random = np.random.default_rng(0)
    prompts = [tuple(int(token) for token in random.integers(SPECIAL_IDS, VOCABULARY, count)) for count in PROMPTS]

    async def answers(prompts: list[tuple[int, ...]], first: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        requests = [Request(ids, SamplingRecipe(), first + seed, TOKENS) for seed, ids in enumerate(prompts)]
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        return [(answer.ids, answer.logprobs) for answer in done]

    async def played() -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
        first = await answers(prompts, 0)
        longer = [prompt + ids + prompt[:5] for prompt, (ids, _) in zip(prompts, first, strict=True)]
        second = await answers(longer, 100)
        pairs = [*zip(prompts, first, strict=True), *zip(longer, second, strict=True)]
        return [(prompt, ids, logprobs) for prompt, (ids, logprobs) in pairs]

    turns = asyncio.run(played())
    streams = [np.array(prompt + ids) for prompt, ids, _ in turns]
    masks = [np.arange(len(prompt + ids)) >= len(prompt) for prompt, ids, _ in turns]
    return streams, masks, np.concatenate([np.array(logprobs) for _, _, logprobs in turns])


def measured(kind: str) -> Row:
    """The row of the model type `kind`."""
    if kind in UNBUILDABLE:
        return Row(kind, "not a language model", reason=UNBUILDABLE[kind])
    with tempfile.TemporaryDirectory() as directory:
        save_tiny(kind, Path(directory), VOCABULARY)
        tokenizer_of(VOCABULARY).save_pretrained(directory)
        try:
            policy = posttrain.Policy(directory)
            engine = posttrain.LocalEngine(policy, slots=4)
        except InputError as error:
            return Row(kind, "refused", reason=str(error).removeprefix("model.path: ").replace(directory, "the model"))
        path = path_of(policy.model)
        attention = {} if path.packed else {"attn_implementation": path.attention}
        reference = transformers.AutoModelForCausalLM.from_pretrained(directory, **attention).eval()
    engine.load_weights(0)
    streams, masks, logprobs = sampled_streams(engine)
    with torch.no_grad():
        together = policy.score(streams, masks, 1.0, 512).logprobs.numpy()
        apart = np.concatenate(
            [policy.score([ids], [mask], 1.0, 512).logprobs.numpy() for ids, mask in zip(streams, masks, strict=True)]
        )
        theirs = []
        for ids, mask in zip(streams, masks, strict=True):
            scores = reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].log_softmax(-1).numpy()
            theirs.append(scores[np.flatnonzero(mask) - 1, ids[mask]])
    return Row(
        kind,
        "packed" if path.packed else "alone",
        engine._parts.kind,
        float(np.abs(together - apart).max()),
        float(np.abs(together - np.concatenate(theirs)).max()),
        float(np.abs(together - logprobs).max()),
        path.reason,
    )


def with_images(kind: str) -> Row:
    """The row of a model type that reads images, for conversations with none to three of them."""
    from plugins.images.tests.conftest import part, picture, text
    from plugins.images.tests.tiny import save_tiny as save_seeing

    from posttrain.data.messages import messages_of
    from posttrain.data.rendering import Renderer
    from posttrain.images import FIRST, key_of, number_of
    from posttrain.rollout.transcript import TokenTranscript

    with tempfile.TemporaryDirectory() as directory:
        save_seeing(Path(directory), kind)
        policy = posttrain.Policy(directory)
        engine = posttrain.LocalEngine(policy, slots=4)
        reference = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    engine.load_weights(0)
    renderer, images = Renderer(policy.tokenizer, policy.end_tokens), policy.tokenizer.images

    def asked(*sizes: tuple[int, int]) -> list[dict]:
        parts = [*(part(picture(*size)) for size in sizes), text("what is it?")]
        return messages_of([{"role": "user", "content": parts}], "messages")

    async def played(number: int, first: list[tuple[int, int]], second: list[tuple[int, int]]) -> TokenTranscript:
        transcript = TokenTranscript(renderer, asked(*first))
        for turn in range(2):
            request = Request(tuple(transcript.context), SamplingRecipe(), 10 * number + turn, TOKENS)
            done = await engine.generate(request)
            transcript.answer(done.ids, done.logprobs, done.stop_reason, done.versions)
            transcript.observe(asked(*second))
        return transcript

    async def all_played() -> list[TokenTranscript]:
        cases: list[tuple[list, list]] = [([], []), ([(40, 64)], []), ([(40, 64), (90, 48)], [(20, 70)])]
        return await asyncio.gather(*(played(number, *case) for number, case in enumerate(cases)))

    streams = [stream for transcript in asyncio.run(all_played()) for stream in transcript.streams()]
    # transformers would take a sampled placeholder for one more image.
    stops = [[*np.flatnonzero(stream.ids == images.token), len(stream)][0] for stream in streams]
    ids = [stream.ids[:stop] for stream, stop in zip(streams, stops, strict=True)]
    masks = [stream.sampled[:stop] for stream, stop in zip(streams, stops, strict=True)]
    logprobs = [stream.rollout_logprobs[:stop] for stream, stop in zip(streams, stops, strict=True)]
    theirs = []
    with torch.no_grad():
        together = policy.score(ids, masks, 1.0, 512).logprobs.numpy()
        apart = [policy.score([row], [mask], 1.0, 512).logprobs.numpy() for row, mask in zip(ids, masks, strict=True)]
        for row, mask in zip(ids, masks, strict=True):
            seen, keys = row >= FIRST, [key_of(int(one)) for one in row if one >= FIRST and number_of(int(one)) == 0]
            inputs = images.inputs(keys, torch.device("cpu")) if keys else {}
            types = {"gemma3": "token_type_ids"}.get(kind, "mm_token_type_ids" if "qwen" in kind else "")
            inputs |= {types: torch.from_numpy(seen.astype(int))[None]} if keys and types else {}
            plain = torch.from_numpy(np.where(seen, images.token, row))[None]
            logits = reference(input_ids=plain, **inputs, use_cache=False).logits[0].log_softmax(-1).numpy()
            theirs.append(logits[np.flatnonzero(mask) - 1, row[mask]])
    sampled = [logs[mask] for logs, mask in zip(logprobs, masks, strict=True)]
    others = map(np.concatenate, (apart, theirs, sampled))
    distances = [float(np.abs(together - other).max()) for other in others]
    path = path_of(policy.model)
    return Row(kind, "packed" if path.packed else "alone", engine._parts.kind, *distances, path.reason)


def safely(kind: str, measure: Callable[[str], Row]) -> Row:
    """The row that `measure` makes, or one with the error that it ends in."""
    try:
        return measure(kind)
    except Exception as error:
        return Row(kind, "error", reason=f"{type(error).__name__}: {error}".splitlines()[0][:160])


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.0e}"

    lines = [
        "| type | path | engine | packed - alone | ours - theirs | engine - learner | why |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {row.type} | {row.path} | {row.engine} | {number(row.alone)} | {number(row.own)} | {number(row.sampled)} | {row.reason} |"
        for row in rows
    ]
    return "\n".join(lines)


PAGE = """# Model families

```console
$ python benchmarks/families.py
```

This makes a tiny random model of every causal language model of transformers {version}, loads it as a policy, samples two turns of
three conversations with the local engine, and scores them. Every loaded model passes the same gate: its path is the fastest one
that agrees with transformers, to 0.001 nats in float32. A model for which none does is refused.

- **path**: `packed` streams share one forward pass. Streams `alone` have one each, which is slower.
- **engine**: `paged` decodes all sequences together. `cached` and `placed` keep a cache of transformers for each sequence. `whole`
  computes a sequence again for each token, because the family's cache is not exact.
- **distances**, the largest in nats per token: packed from alone, ours from transformers', the engine's from the learner's.

Positions that depend on the length (`longrope`, `dynamic`) are those of each stream: a stream beyond the switch is computed once for
each set of frequencies, and an engine computes a sequence again when it crosses. With `dynamic`, that is every token beyond the
original length.

{counts}.

{table}

## Models that read images

`pip install ./plugins/images` adds these types ([how to train them](../how-to/images.md)). The conversations have none to three images of different
sizes, and the distances are the same.

{seeing}
"""


def main() -> int:
    """Print the table, and return 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--images", action="store_true", help="only the types that read images")
    parser.add_argument("--out", type=Path, help="the page to write")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for kind in () if chosen.images else chosen.types or model_types():
        rows.append(safely(kind, measured))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    seeing = []
    for kind in sorted(entry_points("posttrain.models")) if chosen.images or not chosen.types else ():
        seeing.append(safely(kind, with_images))
        print(table(seeing[-1:]).splitlines()[-1], flush=True)
    counts = {path: sum(row.path == path for row in rows) for path in dict.fromkeys(row.path for row in rows)}
    wrong = [row.type for row in (*rows, *seeing) if row.wrong]
    summary = (
        ", ".join(f"{count} {path}" for path, count in counts.items()) + "; wrong: " + (", ".join(wrong) or "none")
    )
    print(summary)
    if chosen.out is not None:
        chosen.out.write_text(
            PAGE.format(version=transformers.__version__, counts=summary, table=table(rows), seeing=table(seeing))
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
