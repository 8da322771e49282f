"""Sequence parallelism: P processes that compute each row together make the updates of one process.

Bounds in float32, relative to the size of what is compared where it is above 1: losses and other metrics, gradients, updated
weights, values, rewards and distributions are within 1e-5.
"""

import numpy as np
import pytest
import torch
from benchmarks.harness import tiny_families
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from posttrain.distributed.sharding import full_tensor, set_shard, shard_like
from posttrain.distributed.world import World, current_world
from posttrain.errors import InputError
from posttrain.losses import surrogates
from posttrain.losses.distillation import TeacherScores
from posttrain.models import packing, sequence
from posttrain.models.critic import Critic, SharedCritic
from posttrain.models.forward import ForwardPath
from posttrain.models.load import load_model
from posttrain.models.packing import pack_row
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.distill import JsdLoss
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.loss import DpoLoss, EntropyRecipe, RewardLossRecipe
from posttrain.recipe.model import LearnerRecipe, ModelRecipe, OptimizerRecipe
from posttrain.seeds import random_stream
from posttrain.training.distill import DistillationObjective, distillation_forward
from posttrain.training.objectives import (
    PairObjective,
    PolicyObjective,
    RewardObjective,
    SharedObjective,
    SupervisedObjective,
    ValueObjective,
    energy_forward,
    logprobs,
    reward_forward,
    token_forward,
)
from posttrain.training.optimizer import Optimizer
from posttrain.training.rows import stream_of
from posttrain.training.unit_rewards import entropies_under
from posttrain.training.updater import PreferenceSide, Sample, Updater, means
from tests.conftest import make_tokenizer, save_tiny_model, tiny_config

from . import together

BOUND = 1e-5
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


# -- the split ---------------------------------------------------------------------------------------------------------


STREAMS = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 20), st.integers(0, 3)), min_size=1, max_size=6)


@settings(max_examples=100)
@given(streams=STREAMS, count=st.integers(2, 5))
def test_parts_of_a_row_cover_it_and_gather_in_its_order(streams, count):
    """Each process in turn, with a gather that collects what all of them send."""
    ids = [np.array([prompt] * 5 + [prompt * 7 + i for i in range(length)]) for prompt, length, _ in streams]
    row = pack_row(ids, [np.arange(len(one)) > skipped for one, (*_, skipped) in zip(ids, streams, strict=True)])
    hardware = HardwareRecipe(processes=count, sequence_parallel=count)
    with pytest.MonkeyPatch.context() as patch:
        parts = []
        for rank in range(count):
            patch.setattr(packing, "current_world", lambda rank=rank: World(hardware, rank, count))
            parts.append(packing.RowPart(row.ids, row.layout, row.predictors, torch.device("cpu")))
        held = [part._row for part in parts]
        assert len({len(ids) for ids, *_ in held}) == 1
        padding = torch.cat([ids for ids, *_ in held])[len(row.ids) :]
        assert len(padding) < count
        assert torch.cat([ids for ids, *_ in held])[: len(row.ids)].tolist() == row.ids.tolist()
        positions = torch.cat([positions for _, positions, *_ in held])[: len(row.ids)]
        assert positions.tolist() == row.layout.positions().tolist()
        # What each process reads at its own places, token and position, in the order that was asked for.
        own = [torch.stack([ids[at], positions[at]], 1) for ids, positions, _, at in held]
        assert sorted(np.concatenate([part.mine for part in parts])) == list(range(len(row.predictors)))
        sent = [torch.zeros(part._most, 2, dtype=torch.int64) for part in parts]
        for buffer, numbers in zip(sent, own, strict=True):
            buffer[: len(numbers)] = numbers
        whole = torch.cat(sent)[parts[0]._places]
        assert whole[:, 0].tolist() == row.ids[row.predictors].tolist()
        assert whole[:, 1].tolist() == row.layout.positions()[torch.from_numpy(row.predictors)].tolist()


def test_a_model_that_cannot_be_divided_is_refused_by_its_type(tmp_path, tiny_policy, monkeypatch):
    def refuse(model, count):
        hardware = HardwareRecipe(processes=count, sequence_parallel=count)
        monkeypatch.setattr(sequence, "current_world", lambda: World(hardware, 0, count))
        sequence.refuse_undivided(model)

    refuse(tiny_policy.model, 4)
    with pytest.raises(InputError, match=r"llama models .* 3 processes cannot share 4 attention heads"):
        refuse(tiny_policy.model, 3)
    save_model(tmp_path / "lfm2", "lfm2")
    with pytest.raises(InputError, match=r"lfm2 models .* convolutions"):
        load_model(ModelRecipe(path=str(tmp_path / "lfm2")))
    path = ForwardPath(packed=False, reason="their layers do not accept packed rows")
    monkeypatch.setattr(tiny_policy.model, "forward_path", path)
    with pytest.raises(InputError, match=r"llama models .* not packed, because their layers"):
        refuse(tiny_policy.model, 2)


@pytest.mark.parametrize("hardware", [{"processes": 3}, {"processes": 4, "ray": "auto", "dedicated": {"critic": 1}}])
def test_processes_form_whole_groups(hardware):
    with pytest.raises(ValidationError, match=r"make the former a multiple"):
        HardwareRecipe.model_validate(hardware | {"sequence_parallel": 2})


# -- updates on given samples ------------------------------------------------------------------------------------------


def given_samples(pairs=False):
    """Six samples of three prompts, two of each prompt, so that rows are prefix trees; the third prompt is long, so the first
    processes of its row have nothing to score."""
    draws, samples = random_stream(0, "divided rows"), []
    for group, prompt_length in enumerate((6, 11, 70)):
        prompt = draws.integers(3, 250, prompt_length)
        for member, length in enumerate((5 + 8 * (group < 2), 3)):
            answer = draws.integers(3, 250, length)
            sampled = np.arange(prompt_length + length) >= prompt_length
            stream = stream_of(np.concatenate([prompt, answer]), sampled)
            stream.rollout_logprobs[sampled] = draws.normal(-5.5, 0.1, length)
            sample = Sample(stream, f"sample {len(samples)}", draws.normal(size=length).astype(np.float32))
            sample.values, sample.returns = draws.normal(size=(2, length)).astype(np.float32)
            sample.episode, sample.group = len(samples), group
            sample.side = PreferenceSide(group, member == 0, 0.5) if pairs else None
            samples.append(sample)
    return samples


def update(model, forward, objective, samples, joint=None):
    """Metrics and gradients of the second of two updates, and the new weights; rows of at most 90 tokens."""
    found = {}

    class Kept(Optimizer):
        def step(self):
            for each in self.trained:
                found[f"gradient {each.name}"] = full_tensor(shard_like(each.gradient, each.parameter)).clone()
            return super().step()

    # AdamW divides by the size of a gradient: with a smaller epsilon, rounding would decide the update of the smallest ones.
    recipe = OptimizerRecipe(learning_rate=1e-3, epsilon=1e-5)
    optimizers = {name: Kept(list(head.named_parameters()), recipe, 2) for name, head in (joint or {}).items()}
    optimizer = Kept(model.trainable(), recipe, 2)
    learner = Updater(model, optimizer, LearnerRecipe(tokens_per_batch=90), forward, joint=optimizers)
    learner.update(samples, objective)  # after which adapters have gradients
    totals = means(learner.update(samples, objective))
    found |= {f"weight {name}": full_tensor(parameter.detach()) for name, parameter in model.trainable()}
    return found | {f"metric {name}": torch.tensor(value) for name, value in totals.items()}


def supervised(path, **settings):
    policy = Policy(str(path), threads=1, **settings)
    return update(policy, token_forward(policy, LearnerRecipe()), SupervisedObjective(), given_samples())


def rl(path, loss="ppo", shared=False, **settings):
    """A policy loss with an entropy bonus; `shared`: and a value head on the policy's trunk."""
    policy = Policy(str(path), threads=1, **settings)
    kind = {"ppo": surrogates.PpoLoss, "gspo": surrogates.GspoLoss}[loss]
    objective = PolicyObjective(kind(type=loss), entropy=EntropyRecipe(coefficient=0.01))
    if not shared:
        return update(policy, token_forward(policy, LearnerRecipe()), objective, given_samples())
    critic = SharedCritic(policy)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    forward = token_forward(policy, LearnerRecipe(), head=critic.head)
    found = update(policy, forward, SharedObjective(objective, 0.5, 0.2), given_samples(), {"critic": critic.head})
    values = value_forward(critic)(given_samples()).detach()
    # An update of the head without the trunk.
    head = update(critic, value_forward(critic), ValueObjective(0.2), given_samples())
    return found | {"values": values} | {f"head {key}": value for key, value in head.items()}


def value_forward(critic):
    return lambda samples: critic.values([s.stream.ids for s in samples], [s.stream.sampled for s in samples])


def critic(path, **settings):
    model = Critic(str(path), threads=1, **settings)
    head = model._head().weight
    set_shard(head, torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    found = update(model, value_forward(model), ValueObjective(0.2), given_samples())
    return found | {"values": value_forward(model)(given_samples()).detach()}


def dpo(path, **settings):
    policy = Policy(str(path), threads=1, **settings)
    forward, samples = token_forward(policy, LearnerRecipe()), given_samples(pairs=True)
    learner = Updater(policy, Optimizer(policy.trainable(), OptimizerRecipe(), 1), LearnerRecipe(), forward)
    with policy.as_reference():
        for sample, reference in zip(samples, logprobs(learner, samples), strict=True):
            sample.ref_logprobs = reference + 0.1 * (np.arange(len(reference)) % 3)
    return update(policy, forward, PairObjective(DpoLoss(), 0.2), samples)


def reward(path, **settings):
    """Bradley-Terry, and the values of units and prefixes, whose rows have probes."""
    model = RewardModel(str(path), threads=1, **settings)
    samples = given_samples(pairs=True)
    streams = [sample.stream for sample in samples]
    ids, sampled = [s.ids for s in streams], [s.sampled for s in streams]
    ends = [np.flatnonzero(mask)[[0, 2]] for mask in sampled]
    with torch.no_grad():
        units = model.unit_rewards(ids, sampled, ends).rewards
    prefixes = torch.from_numpy(np.concatenate(model.prefix_rewards(ids, [end + 1 for end in ends])))
    found = update(model, reward_forward(model), RewardObjective(RewardLossRecipe()), samples)
    return found | {"units": units, "prefixes": prefixes}


def distill(path, **settings):
    """A divergence beside the output projection, whole and truncated distributions, energies, and entropies for units."""
    policy, samples = Policy(str(path), threads=1, **settings), given_samples()
    streams = [sample.stream for sample in samples]
    asked = [s.ids for s in streams], [s.sampled for s in streams], 0.7, 4
    whole, _ = policy.distributions(*asked, 300, None)
    best, chosen = policy.distributions(*asked, 300, 5)
    ends = np.cumsum([sample.sampled_tokens for sample in samples])[:-1]
    for sample, part in zip(samples, np.split(np.roll(whole, 1, axis=1), ends), strict=True):
        sample.teacher = TeacherScores(part[:, 0], None, part)
    energies = energy_forward(policy, LearnerRecipe(logits_per_chunk=4), 0.7)
    with torch.no_grad():
        found = {"whole": torch.from_numpy(whole), "best": torch.from_numpy(best), "energies": energies(samples)}
    entropies = policy.compute(entropies_under, policy.model, samples, 90)
    found |= {"chosen": torch.from_numpy(chosen), "entropies": torch.from_numpy(np.concatenate(entropies))}
    forward = distillation_forward(policy, LearnerRecipe(logits_per_chunk=4), 0.7, JsdLoss(type="jsd"))
    return found | update(policy, forward, DistillationObjective(JsdLoss(type="jsd")), samples)


LORA = {"lora": {"rank": 4}}
CASES = {
    "sft": (supervised, "llama", {}),
    "rl lora": (rl, "llama", LORA),
    "gspo checkpointed": (rl, "qwen3", {"loss": "gspo", "gradient_checkpointing": True}),
    "shared critic": (rl, "llama", {"shared": True}),
    "critic": (critic, "llama", {}),
    "critic lora": (critic, "llama", LORA),
    "dpo": (dpo, "llama", {}),
    "dpo lora": (dpo, "llama", LORA),
    "reward": (reward, "llama", {}),
    "reward lora": (reward, "llama", LORA),
    "distill": (distill, "llama", {}),
    "windows and soft caps": (supervised, "gemma2", {}),
    "sinks": (supervised, "gpt_oss", {}),
    "windows": (supervised, "mistral", {}),
    "values of another size": (supervised, "deepseek_v3", {}),
    "experts": (supervised, "qwen3_moe", {}),
    "one key head": (supervised, "one key head", {}),
}
QUICK = ("sft", "rl lora", "critic", "dpo", "reward", "windows and soft caps")


def run_cases(folder, names, out):
    for name in names:
        measure, model, settings = CASES[name]
        found = measure(folder / model, **settings)
        if current_world().is_rank0:
            torch.save(found, out / f"{name}.pt")


def save_model(folder, name):
    if name in ("llama", "qwen3"):
        save_tiny_model(folder, name)
    elif name == "one key head":
        config = tiny_config("llama", len(tokenizer := make_tokenizer()))
        config.num_key_value_heads = 1
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        tokenizer = make_tokenizer()
        tiny_families.save_tiny(name, folder, len(tokenizer))
        tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A function that returns the results of cases in so many processes, of which P compute a row together."""
    models, known = tmp_path_factory.mktemp("models"), {}

    def run(processes, count, names):
        out = tmp_path_factory.mktemp(f"{processes}-{count}")
        for name in {CASES[name][1] for name in names}:
            if not (models / name).exists():
                save_model(models / name, name)
        missing = [name for name in names if (processes, count, name) not in known]
        job = {"call": run_cases, "arguments": (models, missing, out)}
        job["hardware"] = {"processes": processes, "sequence_parallel": count}
        if missing:
            together.succeed(processes, [job], out)
        known.update({(processes, count, name): torch.load(out / f"{name}.pt") for name in missing})
        return {name: known[processes, count, name] for name in names}

    return run


@pytest.mark.parametrize(
    ("processes", "count", "names"),
    [
        (2, 2, QUICK),
        pytest.param(2, 2, tuple(name for name in CASES if name not in QUICK), marks=SLOW),
        pytest.param(4, 2, tuple(CASES), marks=SLOW),
        pytest.param(4, 4, tuple(CASES), marks=SLOW),
    ],
)
def test_updates_are_those_of_one_process(measured, processes, count, names):
    expected, found = measured(1, 1, names), measured(processes, count, names)
    wrong = {}
    for name in names:
        assert expected[name].keys() == found[name].keys()
        largest = {key: float(tensor.abs().max()) for key, tensor in expected[name].items()}
        assert all(size > 0 for key, size in largest.items() if "metric" not in key), largest
        steepest = max(size for key, size in largest.items() if key.startswith("gradient"))
        for key, tensor in expected[name].items():
            difference = float((found[name][key].double() - tensor).abs().max())
            size = steepest if "gradient" in key else largest[key]
            if difference > BOUND * max(1.0, size):
                wrong[name, key] = difference, size
    assert not wrong


# -- families ----------------------------------------------------------------------------------------------------------

DIVIDED = (
    *("gemma3_text", "gemma3n_text", "phi3", "cohere2", "olmo2", "glm4", "gpt2", "gpt_neox", "opt", "starcoder2"),
    *("granite", "smollm3", "qwen2_moe", "mixtral", "deepseek_v2", "phimoe", "minimax_m2", "ernie4_5_moe"),
    *("dbrx", "jetmoe"),
)
REFUSED = ("mamba", "lfm2", "qwen3_next", "recurrent_gemma", "bloom", "stablelm", "llama4_text")


def score_families(folder, names, out):
    """The log-probabilities of each family, or the sentence that refuses it."""
    streams = [sample.stream for sample in given_samples()]
    for name in names:
        try:
            policy = Policy(str(folder / name), threads=1)
            with torch.no_grad():
                found = policy.score([s.ids for s in streams], [s.sampled for s in streams], 1.0, 512).logprobs
        except InputError as error:
            found = str(error)
        if current_world().is_rank0:
            torch.save(found, out / f"{name}.pt")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_families_are_divided_exactly_or_refused_by_name(tmp_path):
    names = [*DIVIDED, *REFUSED]
    for name in names:
        save_model(tmp_path / name, name)
    found = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        out.mkdir()
        job = {"call": score_families, "arguments": (tmp_path, names, out)}
        job["hardware"] = {"processes": processes, "sequence_parallel": processes}
        together.succeed(processes, [job], out)
        found.append({name: torch.load(out / f"{name}.pt") for name in names})
    alone, divided = found
    for name in REFUSED:
        assert "hardware.sequence_parallel" in divided[name], name
        assert name.replace("_text", "") in divided[name]
    wrong = {name: divided[name] for name in DIVIDED if isinstance(divided[name], str)}
    assert not wrong
    assert max(float((divided[name] - alone[name]).abs().max()) for name in DIVIDED) < BOUND
