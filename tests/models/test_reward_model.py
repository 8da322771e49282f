"""Reward models: the scores of transformers, for any packing, and files that transformers loads."""

import numpy as np
import pytest
import torch

from posttrain.errors import InputError
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from tests.conftest import save_tiny_model

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


def transformers_scores(path, ids, padded):
    """Scores of `AutoModelForSequenceClassification` for token ids, one by one or padded in one batch."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    with torch.no_grad():
        if not padded:
            return torch.cat([model(torch.from_numpy(row)[None]).logits[:, 0] for row in ids])
        longest = max(len(row) for row in ids)
        batch = torch.full((len(ids), longest), model.config.pad_token_id)
        for number, row in enumerate(ids):
            batch[number, : len(row)] = torch.from_numpy(row)
        attention = torch.tensor([[place < len(row) for place in range(longest)] for row in ids])
        return model(batch, attention_mask=attention).logits[:, 0]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=4)])
def test_an_exported_model_gives_transformers_the_same_scores(architecture, lora, tmp_path):
    base = save_tiny_model(tmp_path / "base", architecture)
    model = RewardModel(ModelRecipe(path=str(base), lora=lora), seed=3)
    with torch.no_grad():  # as if trained: away from where the adapters do nothing
        generator = torch.Generator().manual_seed(0)
        for _, parameter in model.trainable():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    ids, sampled = streams()
    with torch.no_grad():
        ours = model.rewards(ids, sampled)
        alone = torch.cat([model.rewards([i], [s]) for i, s in zip(ids, sampled, strict=True)])
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=1e-5)
    assert ours.std() > 1e-3
    model.set_statistics(0.25, 1.5)
    model.export(tmp_path / "model")
    for padded in (False, True):
        torch.testing.assert_close(
            transformers_scores(tmp_path / "model", ids, padded), ours, atol=1e-5, rtol=1e-5, msg=f"padded {padded}"
        )
    again = RewardModel(ModelRecipe(path=str(tmp_path / "model")), new_head=False)
    assert again.statistics == (0.25, 1.5)
    with torch.no_grad():
        torch.testing.assert_close(again.rewards(ids, sampled), ours, atol=1e-5, rtol=1e-5)


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


def test_the_gradient_of_a_packed_pair_is_that_of_separate_passes(tiny_model):
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=1)
    ids, sampled = streams()
    model.rewards(ids, sampled).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.trainable()}
    model.model.zero_grad()
    for i, s in zip(ids, sampled, strict=True):
        model.rewards([i], [s]).sum().backward()
    for name, parameter in model.trainable():
        torch.testing.assert_close(parameter.grad, packed[name], atol=1e-5, rtol=1e-4, msg=name)


def test_padding_is_not_an_end_token(tiny_model, tmp_path):
    """With padding = end token, transformers would read the reward one token before the end."""
    from transformers import AutoTokenizer

    directory = save_tiny_model(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(directory)
    model = RewardModel(ModelRecipe(path=str(directory)))
    assert model.tokenizer.pad_token_id not in model.end_tokens
    ids, sampled = streams()
    ids = [np.append(row, tokenizer.eos_token_id) for row in ids]
    sampled = [np.append(row, True) for row in sampled]
    model.export(tmp_path / "model")
    with torch.no_grad():
        ours = model.rewards(ids, sampled)
    torch.testing.assert_close(transformers_scores(tmp_path / "model", ids, True), ours, atol=1e-5, rtol=1e-5)


def test_the_head_is_drawn_from_its_own_seed(tiny_model):
    heads = [RewardModel(ModelRecipe(path=str(tiny_model)), seed).model.score.weight.detach() for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.5 < float(heads[0].std() * (heads[0].shape[1] + 1) ** 0.5) < 1.5


def test_a_language_model_is_refused_as_a_reward_model(tiny_model):
    with pytest.raises(InputError, match="is not a reward model: it has no head `score`"):
        RewardModel(ModelRecipe(path=str(tiny_model)), new_head=False)
