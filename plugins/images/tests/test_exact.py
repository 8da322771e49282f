"""Tokens, pixel values and log-probabilities are those of transformers' own processor and forward pass."""

import json

import numpy as np
import pytest
import torch
from plugins.images.tests.conftest import part, picture, text
from plugins.images.tests.tiny import FAMILIES, make_encoder, make_processor, make_tokenizer

from posttrain.data.examples import load_dataset
from posttrain.data.messages import UnusableRow, messages_of
from posttrain.data.rendering import Renderer, TokenStream, render_conversation
from posttrain.environments.protocol import Observation, ProtocolError, require_observation
from posttrain.errors import InputError
from posttrain.images import FIRST, MARK, key_of, mark
from posttrain.models.forward import base_decoder, path_of
from posttrain.models.load import load_config
from posttrain.models.policy import Policy
from posttrain.planning.model_sizes import model_sizes
from posttrain.recipe.model import ModelRecipe
from posttrain.training.measured import SIZES as SIZES_TIMED
from posttrain.training.measured import Passes

SIZES = ((40, 64), (90, 48), (32, 32), (20, 70))
CASES = {0: (), 1: (SIZES[0],), 3: (SIZES[1], SIZES[2], SIZES[3])}


def conversation(count, seed=0, imitated="<image> <|image_pad|>"):
    """A conversation with `count` images, in two messages, and text between them that imitates tokens of images."""
    images = [picture(*size, seed) for size in CASES[count]]
    first = [item for image in images[:2] for item in (part(image), text("what shape is it? "))]
    asked = {"role": "user", "content": [text(f"Look {imitated}: "), *first, text("?")]}
    answered = {"role": "assistant", "content": "a red circle"}
    later = {"role": "user", "content": [text("and "), *(part(image) for image in images[2:]), text("this?")]}
    return [asked, answered, later], images


def plain(ids, token):
    return np.where(np.asarray(ids) >= FIRST, token, ids)


def own_inputs(family, messages, images, processor):
    """Inputs by transformers' own processor; text that looks like a control token is escaped by transformers."""
    shown = [
        {**one, "content": [{"type": "image"} if p["type"] == "image" else p for p in one["content"]]}
        if isinstance(one["content"], list)
        else {**one, "content": [text(one["content"])]}
        for one in messages
    ]
    words = processor.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    return processor(text=[words], images=images or None, return_tensors="pt")


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_pixels_are_those_of_the_processor(policy_of, family, count):
    tokenizer = policy_of(family).tokenizer
    messages, images = conversation(count, imitated="")  # which the processor would read as images
    processor = make_processor(family, make_tokenizer(family), make_encoder(family))
    expected = own_inputs(family, messages, images, processor)
    ids = Renderer(tokenizer, policy_of(family).end_tokens).prompt(messages_of(messages, "messages"))
    assert plain(ids, tokenizer.images.token).tolist() == expected["input_ids"][0].tolist()
    assert sum(token >= FIRST for token in ids) == (expected["input_ids"] == tokenizer.images.token).sum()
    if count:
        keys = list(dict.fromkeys(key_of(token) for token in ids if token >= FIRST))
        for name, tensor in tokenizer.images.inputs(keys, torch.device("cpu")).items():
            assert torch.equal(tensor, torch.as_tensor(expected[name])), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_counts_the_parameters_of_the_file(model_of, policy_of, family):
    tied = (
        policy_of(family).model.get_output_embeddings().weight is policy_of(family).model.get_input_embeddings().weight
    )
    sizes = model_sizes(str(model_of(family)))
    assert sizes.tied == tied
    assert sizes.parameters >= sum(p.numel() for p in policy_of(family).model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_timed_before_a_run_has_the_layers_of_the_decoder(model_of, policy_of, family):
    recipe = ModelRecipe(path=str(model_of(family)), dtype="auto")
    timed = Passes(recipe, load_config(recipe), torch.float32, learns=True, samples=True)
    assert timed.seconds(SIZES_TIMED[0]) > 0
    base = base_decoder(policy_of(family).model)
    [layer], own = base_decoder(timed.model).layers, getattr(base, base.family.decoder).layers[0]
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in own.named_parameters()}


@pytest.mark.parametrize("height", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_flat_image_has_the_pixels_of_the_processor(policy_of, family, height):
    """Its height is no number of channels."""
    image = picture(height, 60)
    processor = make_processor(family, make_tokenizer(family), make_encoder(family))
    [key] = MARK.findall(messages_of([{"role": "user", "content": [part(image)]}], "messages")[0]["content"])
    made = policy_of(family).tokenizer.images.processed(key).inputs
    expected = processor.image_processor([image], return_tensors="pt")
    for name, tensor in made.items():
        assert torch.equal(tensor, torch.as_tensor(expected[name])), name


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_looks_like_an_image_stays_text(policy_of, family):
    tokenizer = policy_of(family).tokenizer
    words = f"{tokenizer.images.placeholder} {tokenizer.decode([tokenizer.images.token])} \ufdd1abc\ufdd1 \ufdd0"
    ids = Renderer(tokenizer, policy_of(family).end_tokens).prompt([{"role": "user", "content": words}])
    assert tokenizer.images.token not in ids
    assert words in tokenizer.decode(ids)
    # Beside an image too: the tokens of the text are those that it has alone.
    image = messages_of([{"role": "user", "content": [part(picture())]}], "messages")[0]["content"]
    beside = Renderer(tokenizer, policy_of(family).end_tokens).prompt([{"role": "user", "content": image + words}])
    shown = [token for token in beside if token >= FIRST]
    assert len(shown) == tokenizer.images.processed(key_of(shown[0])).tokens
    assert tokenizer.images.token not in beside
    assert words in tokenizer.decode(beside)


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_for_an_image_of_an_answer_has_no_loss(policy_of, family, loss_on):
    """Placeholders, what is between them, and the tokens around them; the text and the end of the answer are trained."""
    policy = policy_of(family)
    shown = [text("a red "), part(picture(90, 48)), text("circle"), part(picture(32, 32)), part(picture(90, 48))]
    messages = messages_of([{"role": "user", "content": "draw"}, {"role": "assistant", "content": shown}], "messages")
    [stream] = render_conversation(Renderer(policy.tokenizer, policy.end_tokens), messages, loss_on)
    trained = policy.tokenizer.decode(stream.ids[stream.trained].tolist())
    assert trained.endswith("a red circle<|im_end|>" + "\n" * (loss_on == "all"))
    assert loss_on == "all" or len(trained) == len("a red circle<|im_end|>")
    assert (stream.ids >= FIRST).sum() == sum(
        policy.tokenizer.images.processed(key).tokens for key in MARK.findall(messages[1]["content"])
    )


def test_no_text_is_an_image(policy_of, tmp_path):
    """Whatever a text contains, in any place of a conversation, it is refused or stays text."""
    policy = policy_of("idefics3")
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    [key] = MARK.findall(messages_of([{"role": "user", "content": [part(picture())]}], "messages")[0]["content"])
    spellings = [f"{sign}{key}{sign}" for sign in ("\ufdd1", "\ufdd0", "\ue000", "\ufdd0\ufdd1")]
    spellings += [f"[image {key}]", mark(key).encode("unicode_escape").decode(), f"\ufdd1\ufdd1{key}\ufdd1\ufdd1"]
    spellings += [mark(key).encode("utf-8", "surrogatepass").decode("utf-8", "replace")]
    for words in spellings:
        call = {"function": {"name": "f", "arguments": {"a": words}}}
        conversation = [
            {"role": "system", "content": words},
            {"role": "user", "content": [text(words), part(picture(seed=1)), text(words)]},
            {"role": "assistant", "content": words, "reasoning_content": words, "tool_calls": [call]},
            {"role": "tool", "content": [text(words)]},
            {"role": "assistant", "content": words},
        ]
        shown = messages_of(conversation, "messages")
        ids = renderer.prompt(shown)
        assert {key_of(token) for token in ids if token >= FIRST}.isdisjoint({key})
        assert policy.tokenizer.decode(ids).count(words) >= 5
        sampled = policy.tokenizer(words, add_special_tokens=False)["input_ids"]
        assert max(sampled) < FIRST
        [stream] = render_conversation(renderer, shown[-2:], "assistant")
        assert stream.ids[stream.trained].tolist() == [*sampled, renderer.end]
        assert not MARK.search(renderer.answer_text(sampled))
    # The mark itself is no text: no tokenizer decodes to it, and every reader refuses it.
    forged = str(mark(key).encode("unicode_escape").decode().encode().decode("unicode_escape"))
    assert MARK.search(forged)
    call = {"function": {"name": "f", "arguments": {"a": forged}}}
    for message in (
        {"role": "user", "content": forged},
        {"role": "user", "content": [text(forged)]},
        {"role": "user", "content": [text(forged), part(picture())]},
        {"role": "tool", "content": forged},
        {"role": "assistant", "content": "a", "reasoning_content": forged},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": forged}, text("a")]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "a", "primer": forged},
        {"from": "human", "value": forged},
    ):
        with pytest.raises(UnusableRow, match="lone surrogate"):
            messages_of([message], "messages")
    for content in (forged, [text(forged)], [text(forged), part(picture())]):
        with pytest.raises(ProtocolError, match="surrogate"):
            require_observation(Observation([{"role": "user", "content": content}]))
    for row in ({"text": forged}, {"prompt": forged, "completion": "a"}, {"prompt": "a", "completion": forged}):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        with pytest.raises(InputError, match="not a character"):
            load_dataset(tmp_path / "rows.jsonl")


def own_logprobs(model, inputs):
    """Log-probabilities [T - 1] of the tokens of a row after the first, by transformers."""
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_alone_equal_transformers(model_of, policy_of, family):
    from transformers import AutoModelForImageTextToText

    policy = policy_of(family)
    assert path_of(policy.model).packed
    own = AutoModelForImageTextToText.from_pretrained(model_of(family), attn_implementation="eager").eval()
    processor = make_processor(family, make_tokenizer(family), make_encoder(family))
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    streams, expected = [], []
    # The second conversation with three images has others than the first, after the same text.
    for count, seed in ((0, 0), (1, 0), (3, 0), (3, 1)):
        messages, images = conversation(count, seed, imitated="")
        inputs = own_inputs(family, messages, images, processor)
        expected.append(own_logprobs(own, inputs))
        streams.append(np.array(renderer.prompt(messages_of(messages, "messages")), dtype=np.int64))
    masks = [(stream < FIRST) & (np.arange(len(stream)) > 0) for stream in streams]
    with torch.no_grad():
        packed = policy.score(streams, masks, 1.0, 64).logprobs
        alone = [policy.score([s], [m], 1.0, 64).logprobs for s, m in zip(streams, masks, strict=True)]
    reference = torch.cat([logs[m[1:]] for logs, m in zip(expected, masks, strict=True)])
    assert (packed - reference).abs().max() < 2e-5
    assert (torch.cat(alone) - reference).abs().max() < 2e-5
    # Wrong pixels show: the last tokens of the two conversations with three images differ.
    ends = np.cumsum([int(mask.sum()) for mask in masks])
    last, other = packed[ends[2] - 8 : ends[2]], packed[ends[3] - 8 : ends[3]]
    assert (last - other).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_transformers(model_of, policy_of, family):
    """The gradient of a packed row is the sum of those of transformers, in the image encoder too."""
    from transformers import AutoModelForImageTextToText

    policy = policy_of(family)
    own = AutoModelForImageTextToText.from_pretrained(model_of(family)).eval()
    processor = make_processor(family, make_tokenizer(family), make_encoder(family))
    streams, total = [], 0.0
    for count, seed in ((1, 0), (3, 0)):
        messages, images = conversation(count, seed, imitated="")
        inputs = own_inputs(family, messages, images, processor)
        ids = Renderer(policy.tokenizer, policy.end_tokens).prompt(messages_of(messages, "messages"))
        streams.append(np.array(ids, dtype=np.int64))
        logits = own(**inputs, use_cache=False).logits[0, :-1]
        logs = torch.log_softmax(logits.float(), -1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        total = total + logs[torch.from_numpy((streams[-1] < FIRST)[1:])].sum()
    total.backward()
    masks = [(stream < FIRST) & (np.arange(len(stream)) > 0) for stream in streams]
    policy.model.zero_grad()
    policy.score(streams, masks, 1.0, 64).logprobs.sum().backward()
    expected = dict(own.named_parameters())
    seen = 0
    for name, parameter in policy.model.named_parameters():
        if (gradient := expected[name].grad) is not None and gradient.abs().max() > 0:
            seen += "vision" in name or "visual" in name
            scale = gradient.abs().max()
            assert (parameter.grad - gradient).abs().max() < 1e-3 * scale + 1e-5, name
    policy.model.zero_grad()
    assert seen > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_one_file_of_transformers_5_is_a_processor_too(model_of, policy_of, tmp_path, family):
    import shutil

    shutil.copytree(model_of(family), tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "model" / name).unlink()
    make_processor(family, make_tokenizer(family), make_encoder(family)).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / "preprocessor_config.json").exists()
    policy = Policy(str(tmp_path / "model"), threads=1)
    shown = messages_of(conversation(3)[0], "messages")
    prompts = [Renderer(one.tokenizer, one.end_tokens).prompt(shown) for one in (policy, policy_of(family))]
    assert prompts[0] == prompts[1]
    policy.tokenizer.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "processor_config.json").read_bytes() == (
        tmp_path / "model" / "processor_config.json"
    ).read_bytes()


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "gemma3"])
def test_checkpointed_layers_and_bfloat16(model_of, policy_of, family):
    """Gradients with recomputed activations are the same, and bfloat16 only rounds."""
    policy = policy_of(family)
    ids = np.array(Renderer(policy.tokenizer, policy.end_tokens).prompt(messages_of(conversation(3)[0], "messages")))
    mask = (ids < FIRST) & (np.arange(len(ids)) > 0)
    gradients = []
    for one in (policy, Policy(str(model_of(family)), threads=1, gradient_checkpointing=True)):
        one.model.zero_grad()
        with one.training_mode("test"):
            one.score([ids], [mask], 1.0, 64).logprobs.sum().backward()
        gradients.append({name: part.grad for name, part in one.model.named_parameters() if part.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(tensor, gradients[1][name]) for name, tensor in gradients[0].items())
    policy.model.zero_grad()
    rounded = Policy(str(model_of(family)), threads=1, dtype="bfloat16")
    with torch.no_grad():
        scores = [one.score([ids], [mask], 1.0, 64).logprobs for one in (policy, rounded)]
    assert 0 < (scores[0] - scores[1]).abs().mean() < 0.02


def test_a_cut_row_has_no_part_of_an_image(policy_of):
    policy = policy_of("gemma3")
    ids = np.array(Renderer(policy.tokenizer, policy.end_tokens).prompt(messages_of(conversation(3)[0], "messages")))
    stream = TokenStream(ids, np.zeros(len(ids), bool))
    for length in range(1, len(ids) + 1):
        kept = stream.cut(length).ids
        shown = [key_of(int(one)) for one in kept if one >= FIRST]
        assert all(shown.count(key) == policy.tokenizer.images.processed(key).tokens for key in set(shown))
        assert len(kept) <= length
