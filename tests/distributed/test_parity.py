"""Law 4 with processes: 2 to 6 of them make the updates of one, to float rounding, in every stage, also where they compute
rows together (`hardware.sequence_parallel`) and where two or three replicas are sharded over two processes each (HSDP).

Bounds in float32, after 4 to 8 updates of AdamW at a learning rate of 1e-3 to 3e-3: weights within 5e-6, losses, norms of
gradients and everything else in the metrics within 1e-4 of their size.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from posttrain.distributed.world import current_world
from posttrain.losses.surrogates import PpoLoss
from posttrain.models.policy import Policy
from posttrain.recipe.loss import EntropyRecipe
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.seeds import random_stream
from posttrain.training.objectives import PolicyObjective, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.rows import stream_of
from posttrain.training.updater import Sample, Updater
from tests.conftest import save_tiny_model
from tests.models.families import save_family
from tests.training import preferences, small

from . import together

WEIGHTS, METRICS = 5e-6, 1e-4
OF_BFLOAT16 = 1e-2, 5e-3
"""The weights of norms are about 1, where the next number of bfloat16 is 0.0078 away."""
PPO = {"type": "gae"}
CASES = {
    # 26 rows by 5: the last update of an epoch has one row, and all processes but one have nothing to do.
    "sft": ("sft", {"rows_per_update": 5, "steps": 8, "learner": {"tokens_per_batch": 250}}),
    "sft_lora": (
        "sft",
        {
            "steps": 4,
            "model": {"lora": {"rank": 4}, "gradient_checkpointing": True, "path": "untied"},
            "hardware": {"gradient_sync": "per_forward"},
        },
    ),
    # Each micro-batch's gradient is rounded to bfloat16 before it is added to the others in float32.
    "sft_bfloat16": ("sft", {"steps": 3, "model": {"dtype": "bfloat16"}}),
    "dpo": ("dpo", {"steps": 4, "cache_ref_logprobs": False, "hardware": {"reshard_after_forward": False}}),
    "kto": ("dpo", {"steps": 3, "loss": {"type": "kto"}, "model": {"lora": {"rank": 4}}}),
    "reward": ("reward", {"steps": 4}),
    "reward_lora": ("reward", {"steps": 3, "model": {"lora": {"rank": 4}}}),
    "rl": ("rl", {"steps": 3}),
    "rl_apart": ("rl", {"steps": 2}),
    "distill": ("distill", {"steps": 2, "evaluation": {"every": 0}}),
    "ppo": (
        "rl",
        {"steps": 2, "credit": PPO, "model": {"lora": {"rank": 4}}, "critic": {"optimizer": {"learning_rate": 1e-3}}},
    ),
    "ppo_shared": (
        "rl",
        {"steps": 2, "credit": PPO, "critic": {"backbone": "shared", "updates_before_policy": 1, "coefficient": 0.5}},
    ),
}


QUICK = ("sft", "rl", "ppo", "dpo")
"""Cases that are not slow tests."""
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


def merged(values, changes):
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merged(values[key], value)
        else:
            values[key] = value
    return values


def values_of(case, tiny, folder, hardware=None):
    """The recipe of a case, whose run is `folder`/small."""
    folder.mkdir(parents=True, exist_ok=True)
    stage, changes = CASES[case]
    plays = stage in ("rl", "distill")
    found = small.recipe_values(tiny, folder) if plays else preferences.recipe_values(stage, tiny, folder)
    if stage == "distill":
        found = {key: value for key, value in found.items() if key not in ("kl", "entropy")}
        del found["rollout"]["filter"]
        found |= {"stage": stage, "teacher": {"path": str(tiny.parent / "untied")}}
    found["checkpoint"] = {"every": 100}
    found = merged(found, json.loads(json.dumps(changes)))
    found["hardware"] = found.get("hardware", {}) | (hardware or {})
    if found["model"]["path"] == "untied":
        found["model"]["path"] = str(tiny.parent / "untied")
    if case == "ppo_shared":
        # A process may get rows alone, which have no gradient for the value head.
        texts = [
            {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "On a lake."}]}
        ] * 9
        data = {"train": preferences.write_jsonl(folder / "rows.jsonl", texts), "max_tokens": 200}
        found |= {"ptx": {"data": data, "rows_per_update": 4}}
    if case == "kto":
        found["data"]["train"] = preferences.write_jsonl(folder / "judged.jsonl", preferences.unpaired_rows(13))
        found["data"]["validation"] = preferences.write_jsonl(folder / "judged_too.jsonl", preferences.unpaired_rows(4))
    return found


GIVEN = {
    "given": ("tiny", None),
    "given_dropout": ("tiny", {"rank": 4, "dropout": 0.5}),
    "given_embeddings": ("untied", {"rank": 4, "targets": ["embed_tokens", "lm_head", "q_proj"]}),
    "given_experts": ("experts", {"rank": 4}),
    "given_experts_whole": ("experts", None),
    "given_mixtral": ("mixtral", {"rank": 4}),
    "given_mixtral_whole": ("mixtral", None),
}
"""Names of the updates on given episodes -> their model and adapters."""
OF_TWO = ("given", "given_dropout", "given_embeddings", "given_experts", "given_mixtral_whole")
OF_REPLICAS = ("given_embeddings", "given_experts_whole", "given_mixtral")
"""Those of quick tests."""


def given_updates(model, out, lora):
    """Two updates of PPO's loss on given episodes, one of which alone is longer than the others; saves the weights. Models with
    experts have the load-balancing loss too, and most episodes give the experts of their tokens."""
    routed = Path(model).name in ("experts", "mixtral")
    settings = {"router_aux_loss": 0.3, "gradient_checkpointing": lora is None} if routed else {}
    policy = Policy(str(model), threads=1, lora=lora, **settings)
    # Two micro-batches, one with the long episode; no number of processes divides them further.
    recipe = LearnerRecipe(tokens_per_batch=120)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(learning_rate=1e-3), 2)
    learner = Updater(policy, optimizer, recipe, token_forward(policy, recipe))
    draws, samples = random_stream(0, "given"), []
    for length in (9, 110, 14, 30, 7):
        sampled = np.arange(length) >= 4
        stream = stream_of(draws.integers(3, 250, length), sampled)
        stream.rollout_logprobs[sampled] = draws.normal(-5.5, 0.1, length - 4)
        if policy.routing is not None and length != 30:
            shape = (length, len(policy.routing.layers), 4)
            stream.experts = draws.permuted(np.broadcast_to(np.arange(4, dtype=np.int8), shape), axis=2)[..., :2]
        samples.append(Sample(stream, "given", draws.normal(size=length - 4).astype(np.float32)))
    lines = []
    for _ in range(2):
        totals = learner.update(samples, PolicyObjective(PpoLoss(), entropy=EntropyRecipe(coefficient=0.01)))
        lines.append({key: value / count for key, (value, count) in totals.items() if count})
    if current_world().is_rank0:
        Path(out).mkdir(parents=True)
    policy.save(Path(out) / "policy")
    policy.export(Path(out) / "exported")
    whole = dict(policy.weights())
    stored = load_file(Path(out) / "exported" / "model.safetensors")
    lines.append({"wrong": float(sum(not torch.equal(whole[name], stored[name]) for name in stored))})
    policy.restore(Path(out) / "policy")
    if current_world().is_rank0:
        (Path(out) / "lines.json").write_text(json.dumps(lines))


def jobs(tiny, folder, cases, given, hardware=None):
    """The cases, and the updates on given episodes."""
    found = [{"values": values_of(case, tiny, folder / case, hardware), "apart": case == "rl_apart"} for case in cases]
    for name in given:
        model, lora = GIVEN[name]
        arguments = (tiny.parent / model, folder / name, lora)
        found.append({"call": given_updates, "arguments": arguments, "hardware": hardware or {}})
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "untied", "qwen2")
    save_family(folder / "experts", "qwen3_moe")
    save_family(folder / "mixtral", "mixtral")
    return save_tiny_model(folder / "tiny")


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """A function that returns the folder of the runs of one process, after running the cases that are not there yet."""
    folder = tmp_path_factory.mktemp("alone")

    def run(cases, given):
        missing = [job for job in jobs(models, folder, cases, given) if not finished(job)]
        if missing:
            together.succeed(1, missing, folder)
        return folder

    def finished(job):
        written = job["arguments"][1] if "call" in job else Path(job["values"]["runs"]) / "small"
        return written.exists()

    return run


@pytest.fixture(
    scope="module",
    params=[
        (2, QUICK, 1, OF_TWO),
        pytest.param((2, tuple(case for case in CASES if case not in QUICK), 1, GIVEN), marks=SLOW),
        pytest.param((4, tuple(CASES), 1, GIVEN), marks=SLOW),
        pytest.param((2, tuple(CASES), 2, GIVEN), marks=SLOW),
        pytest.param((4, tuple(CASES), 2, GIVEN), marks=SLOW),
        pytest.param((4, tuple(CASES), 4, GIVEN), marks=SLOW),
        ([2, 2], ("sft",), 1, OF_REPLICAS),
        pytest.param(([3, 2], tuple(CASES), 1, GIVEN), marks=SLOW),
        pytest.param(([3, 2], QUICK, 2, GIVEN), marks=SLOW),
    ],
    ids=[
        *("two", "two_others", "four", "two_together", "four_in_pairs", "four_together"),
        *("two_replicas", "three_replicas", "three_replicas_in_pairs"),
    ],
)
def divided(request, models, tmp_path_factory):
    """Where the runs of so many processes are, of which so many compute a row together, and their cases."""
    folder = tmp_path_factory.mktemp("divided")
    groups, cases, count, given = request.param
    # Each part of a row draws its own masks.
    given = [name for name in given if count == 1 or name != "given_dropout"]
    processes = int(np.prod(groups))
    hardware = {"processes": groups, "sequence_parallel": count} if count > 1 or processes != groups else None
    together.succeed(processes, jobs(models, folder, cases, given, hardware), folder)
    return folder, cases, count, given


COMPUTED, REUSED = "tokens/prefilled", "tokens/reused"
"""Their sum is the prompts' length. Each process computes for itself what groups of several processes have in common."""


def close(one, other, where, bound=METRICS):
    """The same keys, and values that are the same but for rounding."""
    assert one.keys() == other.keys(), where
    one, other = dict(one), dict(other)
    if COMPUTED in one:
        assert one[COMPUTED] <= other[COMPUTED], where
        for line in (one, other):
            line[COMPUTED] += line.pop(REUSED)
    for key, value in one.items():
        if isinstance(value, float):
            assert other[key] == pytest.approx(value, rel=bound, abs=bound), (where, key)
        else:
            assert other[key] == value, (where, key)


def same_weights(one, other, bound=WEIGHTS):
    one, other = load_file(one), load_file(other)
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < bound


def test_every_stage_makes_the_updates_of_one_process(alone, divided):
    where, cases, _, given = divided
    for case in cases:
        of_weights, of_metrics = OF_BFLOAT16 if case == "sft_bfloat16" else (WEIGHTS, METRICS)
        expected, found = (folder / case / "small" for folder in (alone(cases, given), where))
        lines, others = small.metrics(expected), small.metrics(found)
        assert len(lines) == len(others)
        assert sum(line["kind"] == "train" for line in lines) >= 2
        for line, other in zip(lines, others, strict=True):
            close(line, other, (case, line["step"], line["kind"]), of_metrics)
        same_weights(expected / "model" / "model.safetensors", found / "model" / "model.safetensors", of_weights)
        start = load_file(Path(small_start(expected)))
        trained = load_file(expected / "model" / "model.safetensors")
        assert max(float((trained[n] - start[n]).abs().max()) for n in start if n in trained) > 20 * WEIGHTS, case


def small_start(run):
    """The weights that the run began with."""
    return Path(yaml.safe_load((run / "recipe.yaml").read_text())["model"]["path"]) / "model.safetensors"


def test_updates_on_given_episodes_are_those_of_one_process(alone, divided):
    where, cases, count, given = divided
    for name in given:
        expected, found = alone(cases, given) / name, where / name
        lines, others = (json.loads((folder / "lines.json").read_text()) for folder in (expected, found))
        # What an engine outside would be given is what an export holds.
        assert lines.pop() == others.pop() == {"wrong": 0.0}
        for line, other in zip(lines, others, strict=True):
            close(line, other, name)
            assert line["optimizer/gradient_norm"] > 0.01
            assert not ("expert" in name or "mixtral" in name) or line["loss/router"] > 1.9
        file = "model.safetensors" if GIVEN[name][1] is None else "adapter_model.safetensors"
        # Routers divide tokens among products, which round by their numbers of rows; without AVX-512 by more.
        bound = 2 * WEIGHTS if name.endswith("whole") and count > 1 else WEIGHTS
        same_weights(expected / "policy" / file, found / "policy" / file, bound)


def test_only_rank_0_prints(divided):
    folder, cases, *_ = divided
    first, *others = (file.read_text() for file in sorted(folder.glob("log-*.txt")))
    assert first.count("report:") == len(cases)
    assert all("step" not in text for text in others)
