"""Losses and gradients against TRL's, on the token ids that TRL collated, with the same weights.

TRL computes its loss by padded batches of its own trainers; here, log-probabilities come from packed rows.
"""

import pytest
import torch

from posttrain.losses.distillation import generalized_jsd
from posttrain.losses.policy import TokenBatch, dft, nll, token_weights
from posttrain.losses.preference import PairLogprobs, kto_kl, kto_losses, preference_losses
from posttrain.losses.reward import bradley_terry
from posttrain.models.policy import Policy
from posttrain.recipe.loss import (
    ApoDownLoss,
    ApoZeroLoss,
    BcoLoss,
    CdpoLoss,
    DpoLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    SimpoLoss,
)
from posttrain.recipe.model import ModelRecipe

from ..conftest import make_tokenizer, tiny_config

pytest.importorskip("trl", minversion="1.16", reason="trl 1.16 is not installed; it is in the extra `dev`")
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")

ANSWERS = [
    ("Where is the goal?", "Right, two rows down.", "Up"),
    ("Which arm gives the higher reward?", "dragon", "phoenix, as its reward was higher in the only round so far"),
    ("Answer with a direction.", "<answer>Down</answer>", "<answer>Left</answer> or <answer>Right</answer>"),
    ("Do you walk on holes? Think first.", "No: I keep off the holes.", "I do. I walk on them. Yes."),
]


def said(role, text):
    return [{"role": role, "content": text}]


PAIRS = [
    {"prompt": said("user", p), "chosen": said("assistant", c), "rejected": said("assistant", r)} for p, c, r in ANSWERS
]
VERDICTS = [
    {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
    for row, key in zip(PAIRS, ["chosen", "rejected", "rejected", "chosen"], strict=True)
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Everything is on the disk."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of two models whose answers differ by many nats; fresh random weights are all but uniform."""
    from transformers import AutoModelForCausalLM

    found, tokenizer = {}, make_tokenizer()
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config("llama", len(tokenizer)), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(7)
        found[name] = tmp_path_factory.mktemp("trl") / name
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.fixture
def both(models):
    """The policy under test and the reference model, with weights of their own."""
    return [Policy(ModelRecipe(path=str(models[name]))) for name in ("policy", "reference")]


def build(trainer, config, models, directory, rows, with_reference=False, model_class="AutoModelForCausalLM", **keys):
    """A TRL trainer over the policy's weights, and one batch of all rows as it collates them."""
    import transformers
    from datasets import Dataset

    def load(name):
        automatic = getattr(transformers, model_class)
        labels = {} if model_class == "AutoModelForCausalLM" else {"num_labels": 1}
        return automatic.from_pretrained(models[name], dtype=torch.float32, **labels)

    keys |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True}
    built = trainer(
        model=load("policy"),
        args=config(output_dir=str(directory), per_device_train_batch_size=len(rows), **keys),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(models["policy"]),
        **({"ref_model": load("reference")} if with_reference else {}),
    )
    built.model.train()
    return built, next(iter(built.get_train_dataloader()))


def answer_logprobs(policy, ids, attention, answer):
    """Log-probabilities [N] of the answers of a padded batch, each [B, T], in a row, and their lengths [B]."""
    streams = [row[keep.bool()].numpy() for row, keep in zip(ids, attention, strict=True)]
    sampled = [row[keep.bool()].bool().numpy() for row, keep in zip(answer, attention, strict=True)]
    return policy.score(streams, sampled, 1.0, 64).logprobs, torch.tensor([int(mask.sum()) for mask in sampled])


def sums(policy, *columns):
    """Summed log-probability [B] and length [B] of the answers of a padded batch."""
    logprobs, lengths = answer_logprobs(policy, *columns)
    return torch.stack([part.sum() for part in logprobs.split(lengths.tolist())]), lengths


def pair_sums(policy, reference, batch):
    """Our sums of a batch of TRL's DPO trainer: all chosen rows, then all rejected ones."""
    columns = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    with torch.no_grad():
        before, _ = sums(reference, *columns)
    return PairLogprobs(*(half for values in (*sums(policy, *columns), before) for half in values.chunk(2)))


def pair_sums_without_reference(policy, batch):
    """The same of a batch of TRL's CPO and ORPO trainers, which have columns for either answer."""
    found = []
    for side in ("chosen", "rejected"):
        ids, attention, labels = (batch[f"{side}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        found.append(sums(policy, ids, attention, labels != -100))
    return PairLogprobs(found[0][0], found[1][0], found[0][1], found[1][1])


def assert_same_rewards(ours, logged):
    assert ours.chosen_rewards.mean().item() == pytest.approx(logged["rewards/chosen"][-1], abs=1e-5)
    assert ours.rejected_rewards.mean().item() == pytest.approx(logged["rewards/rejected"][-1], abs=1e-5)


def assert_same(theirs, their_model, ours, our_model):
    """Losses to 1e-5, and gradients of all weights to 1e-5 of the largest one."""
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5, rel=0)
    theirs.backward()
    ours.backward()
    gradients = {name: weights.grad for name, weights in their_model.named_parameters()}
    mine = {name: weights.grad for name, weights in our_model.named_parameters()}
    assert mine.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, atol=1e-5 * largest, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("loss_type", "loss"), [("nll", nll), ("dft", dft)])
def test_sft(loss_type, loss, models, both, tmp_path):
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    trainer, batch = build(SFTTrainer, SFTConfig, models, tmp_path, rows, loss_type=loss_type)
    answer = batch["labels"] != -100
    assert 0 < answer.sum() < batch["attention_mask"].sum()
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    logprobs, lengths = answer_logprobs(both[0], batch["input_ids"], batch["attention_mask"], answer)
    weights, divisor = token_weights("token_mean", lengths.tolist())
    unused = torch.zeros_like(logprobs.detach())
    data = TokenBatch(
        rollout_logprobs=unused,
        advantages=unused,
        stream=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        lengths=lengths,
        weights=torch.repeat_interleave(torch.tensor(weights), lengths),
    )
    assert_same(theirs, trainer.model, loss(logprobs, data) / divisor, both[0].model)


@pytest.mark.parametrize(
    ("recipe", "loss_type"),
    [
        (DpoLoss(beta=0.2), "sigmoid"),
        (IpoLoss(beta=0.2), "ipo"),
        (ApoZeroLoss(beta=0.2), "apo_zero"),
        (ApoDownLoss(beta=0.2), "apo_down"),
        (BcoLoss(beta=0.2), "bco_pair"),
    ],
)
def test_losses_against_a_reference(recipe, loss_type, models, both, tmp_path):
    from trl import DPOConfig, DPOTrainer

    trainer, batch = build(DPOTrainer, DPOConfig, models, tmp_path, PAIRS, True, beta=0.2, loss_type=loss_type)
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    ours = preference_losses(recipe, pair_sums(*both, batch))
    assert ours.losses.detach().std() > 0.01
    if loss_type != "ipo":
        # Of ipo, TRL logs beta times the summed log-ratios; our rewards are the averages that its loss compares.
        assert_same_rewards(ours, trainer._metrics["train"])
    assert_same(theirs, trainer.model, ours.losses.mean(), both[0].model)


def test_cdpo(models, both, tmp_path):
    """TRL's DPO trainer smooths labels in `aot` (and, differently, in `robust` and `exo_pair`) and not in `sigmoid`.

    `aot` sorts the log-ratios of a batch before it compares them; of one pair there is nothing to sort, and it is the
    conservative loss. So the pairs go through it one by one.
    """
    from trl import DPOConfig, DPOTrainer

    keys = {"beta": 0.2, "loss_type": "aot", "label_smoothing": 0.15}
    trainer, batch = build(DPOTrainer, DPOConfig, models, tmp_path, PAIRS, True, **keys)
    alone = [{name: values[i :: len(PAIRS)] for name, values in batch.items()} for i in range(len(PAIRS))]
    theirs = torch.stack([trainer.compute_loss(trainer.model, row) for row in alone]).mean()
    recipe = CdpoLoss(beta=0.2, label_smoothing=0.15)
    found = preference_losses(recipe, pair_sums(*both, batch)).losses
    assert_same(theirs, trainer.model, found.mean(), both[0].model)


def test_simpo(models, both, tmp_path):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    keys = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 1.5, "simpo_gamma": 0.8, "max_length": 256}
    trainer, batch = build(CPOTrainer, CPOConfig, models, tmp_path, PAIRS, **keys)
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    ours = preference_losses(SimpoLoss(beta=1.5, gamma=0.8), pair_sums_without_reference(both[0], batch))
    assert_same_rewards(ours, trainer._stored_metrics["train"])
    assert_same(theirs, trainer.model, ours.losses.mean(), both[0].model)


def test_the_odds_ratio_term_of_orpo(models, both, tmp_path):
    """TRL's supervised term is a token mean over the batch with the prompts in it; the paper's, and ours, is a mean
    over each chosen answer. Here both are taken away, and the next test compares the whole."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer, batch = build(ORPOTrainer, ORPOConfig, models, tmp_path, PAIRS, beta=0.3, max_length=256)
    whole = trainer.compute_loss(trainer.model, dict(batch)).item()
    term = whole - trainer._stored_metrics["train"]["nll_loss"][-1]
    found = pair_sums_without_reference(both[0], batch)
    losses = preference_losses(OrpoLoss(beta=0.3), found).losses
    ours = (losses + found.chosen_logprobs / found.chosen_length).mean().item()
    assert abs(term) > 0.05
    assert ours == pytest.approx(term, abs=1e-5)


def test_orpo(models, both, tmp_path):
    """With no prompt but one token (the first is never predicted) and one pair at a time, the definitions agree."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = [{"prompt": "", "chosen": chosen, "rejected": rejected} for _, chosen, rejected in ANSWERS]
    trainer, batch = build(ORPOTrainer, ORPOConfig, models, tmp_path, rows, beta=0.3, max_length=256)
    padding = (batch["chosen_attention_mask"] == 0).sum(1)
    assert torch.equal((batch["chosen_labels"] == -100).sum(1), 1 + padding)
    alone = [{name: values[i : i + 1] for name, values in batch.items()} for i in range(len(rows))]
    theirs = torch.stack([trainer.compute_loss(trainer.model, row) for row in alone]).mean()
    ours = preference_losses(OrpoLoss(beta=0.3), pair_sums_without_reference(both[0], batch))
    logged = trainer._stored_metrics["train"]["rewards/chosen"]
    assert ours.chosen_rewards.mean().item() == pytest.approx(sum(logged) / len(logged), abs=1e-5)
    assert_same(theirs, trainer.model, ours.losses.mean(), both[0].model)


@pytest.mark.parametrize("swapped", [False, True], ids=["first", "swapped"])
def test_kto(swapped, models, both, tmp_path):
    """Swapping policy and reference turns the sign of the mismatched log-ratios: once they count, once they are 0."""
    from trl import KTOConfig, KTOTrainer

    if swapped:
        models, both = {"policy": models["reference"], "reference": models["policy"]}, both[::-1]
    policy, reference = both
    keys = {"beta": 0.05, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    trainer, batch = build(KTOTrainer, KTOConfig, models, tmp_path, VERDICTS, True, **keys)
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    names = ("input_ids", "attention_mask", "completion_mask")
    columns, mismatched = [batch[name] for name in names], [batch[f"KL_{name}"] for name in names]
    with torch.no_grad():
        before = sums(reference, *columns)[0]
        drift = sums(policy, *mismatched)[0] - sums(reference, *mismatched)[0]
    kl = kto_kl(drift)
    assert (kl > 0) != swapped
    # Differences of sums of a hundred nats and more, in float32.
    assert kl.item() == pytest.approx(trainer._metrics["train"]["kl"][-1], abs=1e-4)
    ratios = sums(policy, *columns)[0] - before
    losses = kto_losses(KtoLoss(**keys), ratios, batch["label"].bool(), kl)
    assert_same(theirs, trainer.model, losses.mean(), both[0].model)


@pytest.fixture(scope="module")
def reward_model(models, tmp_path_factory):
    """Directory of the policy's decoder with a head whose scores differ, and the policy's tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    directory = tmp_path_factory.mktemp("trl") / "reward"
    model = AutoModelForSequenceClassification.from_pretrained(models["policy"], num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(0)) / 6)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(models["policy"]).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("centring", [None, 0.05], ids=["free", "centred"])
@pytest.mark.parametrize("margin", [False, True], ids=["plain", "margin"])
def test_reward(margin, centring, reward_model, tmp_path):
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    rows = [row | {"margin": 0.5 * i} if margin else row for i, row in enumerate(PAIRS)]
    kind = "AutoModelForSequenceClassification"
    keys = {"center_rewards_coefficient": centring, "model_class": kind}
    trainer, batch = build(RewardTrainer, RewardConfig, {"policy": reward_model}, tmp_path, rows, **keys)
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    # Each row alone, so that no padding plays a part.
    alone = [row[keep.bool()] for row, keep in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    chosen, rejected = torch.cat([model(input_ids=ids[None]).logits[:, 0] for ids in alone]).chunk(2)
    assert ("margin" in batch) == margin
    losses = bradley_terry(chosen, rejected, batch.get("margin"), centring or 0.0)
    assert losses.detach().std() > 0.01
    assert_same(theirs, trainer.model, losses.mean(), model)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_of_distillation_and_its_gradient(beta, temperature):
    from trl.experimental.gkd import GKDTrainer

    draws = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(2, 6, 50, generator=draws, dtype=torch.float64) for _ in range(2))
    labels = torch.ones(2, 6, dtype=torch.int64)
    labels[0, :2] = -100
    logits.requires_grad_()
    theirs = GKDTrainer.generalized_jsd_loss(logits, teacher, labels=labels, beta=beta, temperature=temperature)
    (expected,) = torch.autograd.grad(theirs, logits)
    student, target = (torch.log_softmax(values / temperature, -1)[labels != -100] for values in (logits, teacher))
    ours = generalized_jsd(student, target, beta).mean()
    (found,) = torch.autograd.grad(ours, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
