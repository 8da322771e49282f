"""Reward models and critics: the scores of transformers, for any packing, and files that transformers loads."""

from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from posttrain.errors import InputError
from posttrain.models.critic import Critic
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from tests.conftest import CHATML, save_tiny_model
from tests.models.families import save_family
from tests.training import small

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

LENGTHS = [(5, 3), (5, 9), (12, 1), (7, 20)]


def streams(seed=0):
    """Two answers to one prompt, and two others."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 250, 5)
    ids, sampled = [], []
    for number, (prompt, answer) in enumerate(LENGTHS):
        start = shared if number < 2 else rng.integers(3, 250, prompt)
        ids.append(np.concatenate([start, rng.integers(3, 250, answer)]))
        sampled.append(np.arange(prompt + answer) >= prompt)
    return ids, sampled


def transformers_scores(model, ids, padded, left=False):
    """Scores of transformers' `model` for token ids, one by one or padded in one batch."""
    with torch.no_grad():
        if not padded:
            return torch.cat([model(torch.from_numpy(row)[None]).logits[:, 0] for row in ids])
        longest = max(len(row) for row in ids)
        batch = torch.full((len(ids), longest), model.config.pad_token_id)
        attention = torch.zeros_like(batch)
        for number, row in enumerate(ids):
            places = slice(longest - len(row), longest) if left else slice(0, len(row))
            batch[number, places], attention[number, places] = torch.from_numpy(row), 1
        return model(batch, attention_mask=attention).logits[:, 0]


def test_exported_adapters_keep_the_head(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    model = RewardModel(ModelRecipe(path=str(base), lora=LoraRecipe(rank=4, export="adapter")), seed=3)
    with torch.no_grad():
        for _, parameter in model.trainable():
            parameter += 0.1
    ids, sampled = streams()
    with torch.no_grad():
        ours = model.rewards(ids, sampled)
    model.set_statistics(-0.5, 2.0)
    model.export(tmp_path / "model")
    again = RewardModel(ModelRecipe(path=str(tmp_path / "model")), new_head=False)
    assert again.statistics == (-0.5, 2.0)
    with torch.no_grad():
        torch.testing.assert_close(again.rewards(ids, sampled), ours, atol=1e-5, rtol=1e-5)


ONE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
TOKENIZERS = {
    "the end token pads": {"pad_token": "<|im_end|>"},
    "nothing pads": {"pad_token": None},
    "a base model's end token pads": {"eos_token": "<|endoftext|>"},
    "the token that ends turns pads": {"eos_token": "<|endoftext|>", "pad_token": "<|im_end|>"},
    "a token of turns pads": {"pad_token": "<|im_start|>"},
    "text pads": {"pad_token": "a"},
    "the end token is the only special one": {"special": ["<|endoftext|>"], "template": ONE},
    "another token is reserved": {
        "special": [*SPECIAL, "<|reserved|>"],
        "pad_token": "<|im_end|>",
        "eos_token": "<|endoftext|>",
    },
}


def tokenizer_with(special=SPECIAL, template=CHATML, **tokens):
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        ["a few words, a few more"] * 4, vocab_size=280, special_tokens=special, show_progress=False
    )
    if special == ["<|endoftext|>"]:
        tokens = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, **({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | tokens)
    )
    tokenizer.chat_template = template
    return tokenizer


EACH = list(product(TOKENIZERS, ("llama", "qwen2"), (None, 4)))
"""Quick are two of four for each tokenizer, such that every two of a tokenizer, a family and adapters occur together."""
QUICK = [one for n, one in enumerate(EACH) if n % 4 in ((0, 3) if n // 4 % 2 else (1, 2))]


@pytest.mark.parametrize("case", small.cases(EACH, QUICK), ids=str)
def test_transformers_scores_alone_and_in_batches_for_any_padding_token(case, tmp_path):
    kind, family, rank = case
    lora = rank and LoraRecipe(rank=rank)
    tokenizer = tokenizer_with(**TOKENIZERS[kind])
    path = save_family(tmp_path / "base", family, tokenizer)
    model = RewardModel(ModelRecipe(path=str(path), lora=lora), seed=3)
    assert model.tokenizer.pad_token_id not in model.end_tokens
    ends = [tokenizer.eos_token_id, *(n for t, n in tokenizer.get_vocab().items() if t == "<|im_end|>")]
    texts = [
        tokenizer(text, add_special_tokens=False).input_ids for text in ("a", "a few", "words, a", "more a few words")
    ]
    ids = [np.array([*text, *end]) for text in texts for end in [[], *([one] for one in dict.fromkeys(ends))]]
    sampled = [np.arange(len(row)) > 0 for row in ids]
    with torch.no_grad():
        for _, parameter in model.trainable():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        ours = model.rewards(ids, sampled)
    assert ours.std() > 1e-3
    model.set_statistics(0.25, 1.5)
    model.export(tmp_path / "model")
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    for padded, left in ((False, False), (True, False), (True, True)):
        theirs = transformers_scores(scorer, ids, padded, left)
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-5, msg=f"padded {padded}, left {left}")
    again = RewardModel(ModelRecipe(path=str(tmp_path / "model")), new_head=False)
    assert again.statistics == (0.25, 1.5)
    with torch.no_grad():
        torch.testing.assert_close(again.rewards(ids, sampled), ours, atol=2e-5, rtol=1e-5)


def test_adapters_without_a_token_to_pad_with_are_refused(tmp_path):
    path = save_family(tmp_path / "base", "qwen2", tokenizer_with(["<|endoftext|>"], ONE))
    with pytest.raises(InputError, match=r"model\.lora\.export"):
        RewardModel(ModelRecipe(path=str(path), lora=LoraRecipe(rank=4, export="adapter")))


def test_an_added_padding_token_is_no_other_tokenizer(tmp_path):
    from posttrain.models.policy import Policy
    from posttrain.recipe.rl import RlRecipe
    from posttrain.training.critic import open_critic
    from posttrain.training.reward_scorer import render_alike

    path = save_family(tmp_path / "base", "qwen2", tokenizer_with(["<|endoftext|>"], ONE))
    RewardModel(str(path), seed=3).export(tmp_path / "reward")
    policy, reward = Policy(str(path)), RewardModel(str(tmp_path / "reward"), new_head=False)
    assert len(reward.tokenizer) == len(policy.tokenizer) + 1
    assert render_alike(reward.tokenizer, policy.tokenizer)
    critic = open_critic(RlRecipe(critic={"path": str(tmp_path / "reward")}, credit={"type": "gae"}), policy).model
    ids, sampled = np.arange(9), np.arange(9) > 3
    with torch.no_grad():
        value, before = critic.values([ids], [sampled])[-1], reward.rewards([ids[:-1]], [sampled[:-1]])[0]
    torch.testing.assert_close(value, before)


def test_the_head_is_drawn_from_its_own_seed(tiny_model):
    heads = [RewardModel(ModelRecipe(path=str(tiny_model)), seed).model.score.weight.detach() for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.5 < float(heads[0].std() * (heads[0].shape[1] + 1) ** 0.5) < 1.5
    with pytest.raises(InputError, match="is not a reward model: it has no head `score`"):
        RewardModel(ModelRecipe(path=str(tiny_model)), new_head=False)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A directory of a reward model, untrained, with a head that is not zero."""
    folder = tmp_path_factory.mktemp("reward")
    RewardModel(ModelRecipe(path=str(save_tiny_model(folder / "base", "qwen3"))), seed=5).export(folder / "model")
    return folder / "model"


def turns():
    """Two answers to one prompt, and a stream of two turns."""
    draws = np.random.default_rng(0)
    prompt = draws.integers(3, 250, 6)
    ids = [np.concatenate([prompt, draws.integers(3, 250, n)]) for n in (4, 7)] + [draws.integers(3, 250, 12)]
    sampled = [np.arange(10) >= 6, np.arange(13) >= 6, np.isin(np.arange(12), [3, 4, 8, 9, 10])]
    return ids, sampled


def test_a_value_is_the_score_of_the_tokens_before(reward_model):
    recipe = ModelRecipe(path=str(reward_model))
    ids, sampled = turns()
    with torch.no_grad():
        values = Critic(recipe).values(ids, sampled)
        judge = RewardModel(recipe, new_head=False)
        places = [(row, place) for row, mask in zip(ids, sampled, strict=True) for place in np.flatnonzero(mask)]
        before = [judge.rewards([row[:place]], [np.arange(place) == place - 1]) for row, place in places]
    torch.testing.assert_close(values, torch.cat(before), atol=1e-5, rtol=1e-5)
    assert values.dtype == torch.float32
    assert len(values) == sum(mask.sum() for mask in sampled)
    rounded = Critic(ModelRecipe(path=str(reward_model), dtype="bfloat16")).values(ids, sampled)
    assert rounded.dtype == torch.float32
    assert min(values.std(), rounded.std()) > 1e-3


@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=2)])
def test_a_critic_from_a_language_model_starts_at_zero_and_learns(lora, tiny_model):
    critic = Critic(ModelRecipe(path=str(tiny_model), lora=lora))
    values = critic.values(*turns())
    assert not values.any()
    ((values - 1) ** 2).sum().backward()
    gradients = {name: p.grad for name, p in critic.trainable() if p.grad is not None}
    assert any("score" in name and gradient.abs().max() > 0 for name, gradient in gradients.items())


def test_values_of_a_reward_model_are_scaled_as_its_rewards_are(tiny_model, tmp_path):
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=5)
    model.set_statistics(0.25, 0.5)
    model.export(tmp_path / "model")
    critic = Critic(ModelRecipe(path=str(tmp_path / "model")))
    with torch.no_grad():
        raw = critic.values(*turns())
        critic.values_in_reward_units = True
        torch.testing.assert_close(critic.values(*turns()), (raw - 0.25) / 0.5)
