"""Models of posttrain in lm-eval, and the `harness` stage, which evaluates a model on tasks of lm-eval.

    python -m posttrain.evaluation.harness --model posttrain --model_args path=runs/run --tasks my_task.yaml

is the command `lm_eval` with the model type `posttrain`. Importing this module also registers the type for
`lm_eval.simple_evaluate`.
"""

import asyncio
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console

from posttrain.engines.factory import open_inference_engine
from posttrain.engines.protocol import Completion, Engine, Request
from posttrain.episode import StopReason
from posttrain.errors import InputError, PosttrainError
from posttrain.evaluation.predictions import digest_of
from posttrain.evaluation.results import Better, MetricResult, Results
from posttrain.evaluation.statistics import ItemScores, combine, item_means, item_sums
from posttrain.models.policy import Policy
from posttrain.plugins import require_trust
from posttrain.recipe.compose import section
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.harness import HarnessRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.runs.directory import RunDirectory, model_path
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.report import write_report
from posttrain.runs.tables import write_results
from posttrain.seeds import derive_seed

_POSITIONS_PER_CHUNK = 512
_DEFAULT_TOKENS = 256
"""Maximum tokens of an answer if a task sets no limit, as in lm-eval."""


@register_model("posttrain")
class HarnessModel(TemplateLM):
    """A policy as a model of lm-eval: likelihoods from the packed forward pass, generation by an engine.

    Texts become tokens as in lm-eval's own model of transformers (`hf`), so that numbers agree up to rounding.
    """

    def __init__(
        self,
        path: str | None = None,
        policy: Policy | None = None,
        engine: Engine | None = None,
        seed: int = 0,
        tokens_per_batch: int = 4096,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        """`path`: a run, or what `model.path` takes; otherwise `policy` and `engine`. The batch sizes of lm-eval are
        not used.
        """
        super().__init__()
        if policy is None:
            if path is None:
                raise InputError("the model posttrain needs its path: --model_args path=runs/run")
            known = {} if dtype is None else {"dtype": dtype}
            if device == "cpu":  # lm-eval's default is cuda:0, even without a GPU
                known["device"] = "cpu"
            policy = Policy(section(ModelRecipe, path=model_path(str(path)), **known))
        self.policy = policy
        self.engine = engine or open_inference_engine(policy, section(LocalEngineRecipe))
        self.tokenizer = policy.tokenizer
        self.seed = int(seed)
        self.tokens_per_batch = int(tokens_per_batch)
        self._device = policy.device
        self._sampled = 0

    # -- tokens
    # ---------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def max_length(self) -> int:
        return int(getattr(self.policy.model.config, "max_position_embeddings", None) or 2048)

    @property
    def max_gen_toks(self) -> int:
        return _DEFAULT_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return str(self.policy.recipe.path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            # A rendered chat may already begin with the first token.
            first = self.tokenizer.decode(self.prefix_token_id)
            special = {"add_special_tokens": False} if first and string.startswith(first) else {}
        else:
            special = {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.tokenizer.chat_template is None:
            raise InputError(f"{self.policy.recipe.path} has no chat template; set apply_chat_template=false")
        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # templates raise errors of any type
            raise InputError(
                f"the chat template of {self.policy.recipe.path} cannot render a task ({type(error).__name__}: {error}); "
                "set apply_chat_template=false, or another template in model.chat_template"
            ) from error
        return str(text)

    # -- likelihoods
    # ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation in nats, whether greedy decoding produces it) of each request."""
        texts = []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise InputError(
                    f"a continuation has {len(continuation)} tokens; it must have at least 1 and at most the model's "
                    f"{self.max_length}"
                )
            ids = np.array([*context, *continuation][-(self.max_length + 1) :], dtype=np.int64)
            texts.append((ids, np.arange(len(ids)) >= len(ids) - len(continuation)))
        scored: dict[int, tuple[float, bool]] = {}
        for group in self._batches([ids for ids, _ in texts]):
            scored |= dict(zip(group, self._score([texts[i] for i in group]), strict=True))
        results = [scored[i] for i in range(len(texts))]
        for (key, _, _), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _batches(self, texts: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """Indices of texts in batches of `tokens_per_batch` tokens. Texts with equal prefixes are adjacent."""
        group: list[int] = []
        total = 0
        for index in sorted(range(len(texts)), key=lambda i: texts[i].tolist()):
            if group and total + len(texts[index]) > self.tokens_per_batch:
                yield group
                group, total = [], 0
            group.append(index)
            total += len(texts[index])
        if group:
            yield group

    def _score(self, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[float, bool]]:
        def most_probable(logprobs: torch.Tensor, _: slice) -> torch.Tensor:
            return logprobs.argmax(-1).double()

        ids, masks = [one for one, _ in texts], [mask for _, mask in texts]
        with torch.no_grad():
            scores = self.policy.score(ids, masks, 1.0, _POSITIONS_PER_CHUNK, measure=most_probable)
        assert scores.measured is not None
        ends = np.cumsum([int(mask.sum()) for mask in masks])[:-1]
        logprobs = np.split(scores.logprobs.double().cpu().numpy(), ends)
        greedy = np.split(scores.measured.cpu().numpy(), ends)
        parts = zip(texts, logprobs, greedy, strict=True)
        return [(float(values.sum()), bool((best == one[mask]).all())) for (one, mask), values, best in parts]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows, counts = [], []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            found = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += found
            counts.append(len(found))
        scored = iter(self._loglikelihood_tokens(windows))
        totals = [math.fsum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # -- generation
    # -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = [self._request(*request.args) for request in requests]

        async def complete(request: Request) -> Completion:
            with self.engine.episode():
                return await self.engine.generate(request)

        async def complete_all() -> list[Completion]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(complete(request)) for request, _ in asked]
            return [task.result() for task in tasks]

        texts = []
        for request, (_, stops), completion in zip(requests, asked, asyncio.run(complete_all()), strict=True):
            kept = len(completion.ids) - (completion.stop_reason is StopReason.END_TOKEN)
            text = self.tokenizer.decode(list(completion.ids[:kept]), skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, stops, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _request(self, context: str, settings: Mapping[str, Any]) -> tuple[Request, list[str]]:
        """The request to the engine, and the stop strings at which the answer is cut."""
        values: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), self.max_gen_toks))
        stops = handle_stop_sequences(values.pop("until"), self.tokenizer.decode(self.eot_token_id))
        limit, samples = int(values.pop("max_gen_toks")), values.pop("do_sample")
        temperature = float(values.pop("temperature", 1.0 if samples else 0.0))
        truncation = {key: values.pop(key) for key in ("top_p", "top_k", "min_p") if key in values}
        if unknown := [key for key, value in values.items() if value is not None]:
            raise InputError(f"generation has no setting {unknown[0]!r}; use max_gen_toks, until, do_sample, temperature, "
                             "top_p, top_k and min_p")  # fmt: skip
        if limit >= self.max_length:
            raise InputError(f"max_gen_toks {limit} must be below the {self.max_length} tokens of the model; lower it")
        sampling = section(
            SamplingRecipe, temperature=temperature if samples else 0.0, **(truncation if samples else {})
        )
        prompt = self.tok_encode(context)[-(self.max_length - limit) :] or [self.prefix_token_id]
        seed = derive_seed(self.seed, "harness", self._sampled)
        self._sampled += 1
        return Request(tuple(prompt), sampling, seed, limit, tuple(stop for stop in stops if stop)), stops


# -- the stage
# ----------------------------------------------------------------------------------------------------------


def run(recipe: HarnessRecipe, directory: RunDirectory, console: Console) -> None:
    """Evaluate on `recipe.tasks`, write results and report, and print the table. InputError if data of a task is
    missing.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with offline():
        if recipe.include_path is not None:
            require_trust(Path(recipe.include_path))
        manager = TaskManager(include_path=recipe.include_path)
        tasks = load_tasks(manager, recipe.tasks)
        policy = Policy(recipe.model.model_copy(update={"path": model_path(recipe.model.path)}), recipe.seed)
        engine = open_inference_engine(policy, recipe.engine, directory.logs)
        with rows_named():
            found = simple_evaluate(
                HarnessModel(None, policy, engine, recipe.seed, recipe.tokens_per_batch),
                tasks=tasks,
                task_manager=manager,
                num_fewshot=recipe.num_fewshot,
                limit=recipe.limit,
                bootstrap_iters=0,
                apply_chat_template=recipe.apply_chat_template,
                system_instruction=recipe.system_instruction,
                gen_kwargs=dict(recipe.gen_kwargs) or None,
                random_seed=recipe.seed,
                numpy_random_seed=recipe.seed,
                torch_random_seed=recipe.seed,
                fewshot_random_seed=recipe.seed,
            )
    assert found is not None
    results = harness_results(found, recipe)
    if not results.metrics:
        raise InputError(f"tasks: nothing was measured: {'; '.join(results.dropped) or 'no task has a metric'}")
    with MetricsLog(directory, recipe.sinks) as log:
        values: dict[str, Any] = {}
        for name, one in results.estimates().items():
            values |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high, f"{name}_n": one.n}
        log.write(0, "final", {"policy": "model", **values})
    results.write(directory.harness)
    table = results.table()
    write_results(directory.path, [table], [])
    write_report(directory, [table], warnings=results.dropped)
    console.print(table)
    for line in [table.note, *results.details(), f"results: {directory.harness}"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def rows_named() -> Iterator[None]:
    """Turn any error that lm-eval raises for a row or a template into an InputError."""
    try:
        yield
    except PosttrainError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InputError(
            f"tasks: lm-eval cannot use a task or one of its rows ({type(cause).__name__}: {_reason(cause)}); correct the rows "
            "or the task; --debug shows where it failed"
        ) from error


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def offline() -> Iterator[None]:
    """Inside the block, Hugging Face's libraries read only local files and caches."""
    import datasets
    import huggingface_hub

    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    known = [(huggingface_hub.constants, names[0]), *((datasets.config, name) for name in names)]
    constants = [(module, name, getattr(module, name)) for module, name in known]
    try:
        os.environ.update(dict.fromkeys(names, "1"))
        for module, name, _ in constants:  # read from the environment when they were imported
            setattr(module, name, True)
        yield
    finally:
        for module, name, value in constants:
            setattr(module, name, value)
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


def load_tasks(manager: TaskManager, names: Sequence[str]) -> list[Any]:
    """The tasks and groups of lm-eval with these names or files. InputError if one is unknown, or its data is not
    local.
    """
    tasks: list[Any] = []
    for name in names:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise InputError(f"tasks: there is no task file {name}; correct the path")
        if name.endswith((".yaml", ".yml")):
            require_trust(Path(name))  # its templates and functions are code
        with rows_named():
            try:
                loaded = manager.load([name])
            except KeyError as error:
                if Path(name).is_file():
                    raise
                raise InputError(
                    f"tasks: lm-eval has no task {name}; see `lm-eval ls tasks`, or give a task file"
                ) from error
            except (ConnectionError, FileNotFoundError) as error:
                raise InputError(
                    f"tasks: the data of {name} is not on this machine ({_reason(error)}); download the data set before, or "
                    "give a task file that reads local files"
                ) from error
        # The first group contains the others.
        groups = list(loaded.get("groups", {}).values())
        tasks += groups[:1] or loaded["tasks"].values()
    return tasks


def harness_results(found: Mapping[str, Any], recipe: HarnessRecipe) -> Results:
    """The metrics of `simple_evaluate` with intervals over documents.

    Metrics that are neither means nor perplexities over documents, such as a corpus F1, are messages with lm-eval's
    value.
    """
    results = Results(recipe.model.path, 0, 0)
    dropped: list[str] = []
    samples: dict[tuple[str, str], dict[str, Any]] = {}
    """(task, metric) -> item -> value."""
    for task, rows in found["samples"].items():
        for row in rows:
            item = f"{task}/{row['doc_id']}"
            results.digests[item] = digest_of([row["doc_hash"], row["target_hash"]])
            for metric in row["metrics"]:
                samples.setdefault((task, f"{metric},{row['filter']}"), {})[item] = row[metric]
    for group in found.get("groups", {}):
        leaves = _leaves(group, found["group_subtasks"])
        for key in dict.fromkeys(metric for task, metric in samples if task in leaves):
            parts = [samples[task, key] for task in leaves if (task, key) in samples]
            samples[group, key] = {item: value for part in parts for item, value in part.items()}
    for (task, key), values in samples.items():
        aggregated = found["results"].get(task, {}).get(key)
        if not isinstance(aggregated, int | float):
            continue
        metric, _, chosen = key.partition(",")
        name = f"{task}/{metric}" if chosen == "none" else f"{task}/{key}"
        scores = _scores(values, aggregated)
        if scores is None:
            dropped.append(f"{name} is {aggregated:.4g}, without an interval: it is not a mean over documents")
            continue
        higher = found["higher_is_better"].get(task, {}).get(metric)
        better: Better = "neither" if higher is None else "higher" if higher else "lower"
        about = {"shots": found["n-shot"].get(task), "task version": found["versions"].get(task)}
        about["chat template"] = "yes" if recipe.apply_chat_template else "no"
        known = {setting: value for setting, value in about.items() if value is not None}
        results.metrics.append(MetricResult(name, scores, better, len(values), about=known))
    results.rows = results.items = len(results.digests)
    results.dropped = dropped
    return results


def _leaves(name: str, children: Mapping[str, Sequence[str]]) -> list[str]:
    if not children.get(name):
        return [name]
    return [leaf for child in children[name] for leaf in _leaves(child, children)]


def _scores(values: Mapping[str, Any], aggregated: float) -> ItemScores | None:
    """Scores per item that combine to lm-eval's value, as a mean or a perplexity; None if neither does."""
    candidates = []
    if all(isinstance(value, bool | int | float) for value in values.values()):
        kind: Any = "rate" if {float(value) for value in values.values()} <= {0.0, 1.0} else "mean"
        candidates = [
            item_means(kind, values.items()),
            item_sums("perplexity", ((item, (-value, 1.0)) for item, value in values.items())),
        ]
    elif all(isinstance(value, tuple | list) and len(value) == 2 for value in values.values()):
        candidates = [item_sums("perplexity", ((item, (-nats, count)) for item, (nats, count) in values.items()))]
    for scores in candidates:
        value = float(combine(scores.kind, scores.table().sum(0)))
        if math.isclose(value, aggregated, rel_tol=1e-6, abs_tol=1e-9):
            return scores
    return None


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
