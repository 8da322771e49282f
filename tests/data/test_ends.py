"""The token that ends an answer is the one that the chat template writes, whatever the tokenizer's end token is."""

import json

import pytest

import posttrain
from posttrain.data.messages import TextExample
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer, end_token_of, render_conversation
from posttrain.data.tokens import tokenize
from posttrain.engines.local.engine import LocalEngine
from posttrain.episode import StopReason
from posttrain.errors import InputError
from posttrain.models.load import load_end_tokens
from posttrain.models.policy import Policy
from posttrain.recipe.data import DataRecipe
from posttrain.rollout.transcript import TokenTranscript
from tests.evaluation.made import write

from ..conftest import CHATML, tiny_config
from .test_encoding import CHAT, played
from .tokenizers import byte_level, made, user


def turns(end, start="<|im_start|>", before="", last=""):
    """A template whose answers end with `end`; `last` is written once, behind a conversation."""
    return (
        f"{{% for m in messages %}}{start}{{{{ m['role'] }}}}\n{{{{ m['content'] }}}}{before}{end}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{start}assistant\n{{% else %}}{last}{{% endif %}}"
    )


TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "gemma": (turns("<end_of_turn>\n"), "<end_of_turn>"),
    "llama3": (turns("<|eot_id|>"), "<|eot_id|>"),
    "phi3": (turns("<|end|>\n", last="{{ eos_token }}"), "<|end|>"),
    "llama2": (turns("<|end|>", before=" "), "<|end|>"),
    "two tokens": (turns("<|end|><|eot_id|>\n"), "<|eot_id|>"),
    "eos": (turns("{{ eos_token }}\n"), "<|endoftext|>"),
    "eos of two": (turns("<|end|>{{ eos_token }}\n"), "<|endoftext|>"),
}
"""Template and the token that ends its answers. The tokenizer's end token is <|endoftext|>, as in base models."""
SPECIAL = ("<end_of_turn>", "<|eot_id|>", "<|end|>")


def tokenizer_of(name):
    return byte_level(TEMPLATES[name][0], "<|endoftext|>", SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_end_with_the_token_of_the_template(name):
    tokenizer = tokenizer_of(name)
    subject = made(tokenizer)
    end = tokenizer.convert_tokens_to_ids(TEMPLATES[name][1])
    assert subject.end == end_token_of(tokenizer) == end
    assert subject.end_tokens == {end, tokenizer.eos_token_id}
    assert subject.warnings() == []
    (row,) = render_conversation(subject, CHAT, "assistant")
    answers = tokenizer.decode(row.ids[row.trained]).split(TEMPLATES[name][1])
    assert [text.removesuffix("<|end|>").strip() for text in answers] == ["Reach the goal", "Up", ""]
    _, (stream,) = played(subject, CHAT)
    assert stream.ids.tolist() == row.ids.tolist()
    assert subject.answer_text(subject.answer("Up")) == "Up"
    assert subject.answer_text([*subject.encode("Up"), tokenizer.eos_token_id]) == "Up"


def test_an_answer_is_ended_once_also_by_another_token_or_role():
    subject = made(tokenizer_of("chatml"))
    transcript = TokenTranscript(subject, CHAT[:1])
    ids = [*subject.encode("Up"), subject.tokenizer.eos_token_id]
    transcript.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
    transcript.observe([user("And?")])
    assert "Up<|endoftext|>\n<|im_start|>user\nAnd?" in subject.tokenizer.decode(transcript.context)
    # The roles of GLM-4 are its end tokens.
    tokenizer = byte_level(
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|endoftext|>",
        ("<|user|>", "<|assistant|>"),
    )
    role = tokenizer.convert_tokens_to_ids("<|user|>")
    subject = Renderer(tokenizer, frozenset({tokenizer.eos_token_id, role}))
    for end, text in ((role, "Up<|user|>\nAnd?<|"), (tokenizer.eos_token_id, "Up<|endoftext|><|user|>\nAnd?<|")):
        transcript = TokenTranscript(subject, CHAT[:1])
        ids = [*subject.encode("Up"), end]
        transcript.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
        transcript.observe([user("And?")])
        assert text in tokenizer.decode(transcript.context)


@pytest.mark.parametrize("end", ["<|finish|>\n", "\n", ""], ids=["text", "newline", "nothing"])
def test_without_an_end_token_in_the_template_answers_end_with_the_tokenizers(end):
    """Each answer is a stream, whose prompt is the template's text without that token."""
    tokenizer = byte_level(turns(end), "<|endoftext|>")
    subject = made(tokenizer)
    (warning,) = subject.warnings()
    assert "<|endoftext|>" in warning
    rows = render_conversation(subject, CHAT, "assistant")
    texts = [tokenizer.decode(row.ids[row.trained]) for row in rows]
    assert texts == ["Reach the goal<|endoftext|>", "Up<|endoftext|>"]
    _, streams = played(subject, CHAT)
    assert [stream.ids.tolist() for stream in streams] == [row.ids.tolist() for row in rows]
    assert tokenizer.decode(rows[1].ids).startswith(tokenizer.apply_chat_template(CHAT[:3], tokenize=False))


def test_plain_text_ends_with_the_tokenizers_end_token_which_must_exist():
    tokenizer = byte_level(turns("\n"))
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="eos_token"):
        Renderer(tokenizer, frozenset())
    tokenizer = tokenizer_of("chatml")
    text = TextExample("Goal<|im_end|>", "a row 1")
    (row,) = tokenize([text], DataRecipe(train="a.jsonl"), made(tokenizer), "all", Problems())
    assert tokenizer.decode(row.streams[0].ids) == "Goal<|im_end|><|endoftext|>"
    assert len(row.streams[0].ids) == len(tokenizer("Goal")["input_ids"]) + 2


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A base model: its own configuration ends with <|endoftext|>, and its template with <|im_end|>."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("base") / "model"
    tokenizer = tokenizer_of("chatml")
    torch.manual_seed(0)
    config = tiny_config("llama", len(tokenizer))
    config.eos_token_id = tokenizer.eos_token_id
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def ends_in(directory):
    return json.loads((directory / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize(
    "lora", [None, {"rank": 2}, {"rank": 2, "export": "adapter"}], ids=["all", "merged", "adapter"]
)
def test_exports_stop_at_the_token_of_the_template(base_model, tmp_path, lora):
    policy = Policy(base_model, lora=lora)
    eos, end = policy.tokenizer.eos_token_id, policy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert policy.end_tokens == {eos, end}
    policy.export(tmp_path)
    assert ends_in(tmp_path) == sorted([eos, end])
    assert load_end_tokens(str(tmp_path), policy.tokenizer) == {eos, end}


def test_a_model_with_one_end_token_keeps_it(tiny_policy, tmp_path):
    tiny_policy.export(tmp_path)
    assert ends_in(tmp_path) == tiny_policy.tokenizer.eos_token_id


def test_a_base_model_is_trained_sampled_and_scored_with_the_end_of_its_template(base_model, tmp_path):
    words = ["Up?", "You?", "Goal?", "think?", "row?", "column?", "arm?", "frozen?"]
    made = [{"prompt": word, "completion": "yes", "label": "yes"} for word in words]
    rows = write(tmp_path / "rows.jsonl", made)
    result = posttrain.sft(
        {"name": "sft", "runs": str(tmp_path), "steps": 30, "rows_per_update": 8, "evaluation": {"every": 0}},
        model={"path": str(base_model), "threads": 1},
        data={"train": str(rows), "cache": str(tmp_path / "cache")},
        optimizer={"learning_rate": 1e-2},
    )
    model = result.run / "model"
    assert len(ends_in(model)) == 2
    environment = posttrain.make_env("text_task", prompts=[str(rows)], reward="exact")
    episodes = posttrain.rollout(LocalEngine(Policy(model)), environment, seeds=range(8), temperature=0.0, max_tokens=8)
    assert [episode.turns[0].answer for episode in episodes] == ["yes"] * 8
    assert {episode.turns[0].stop_reason for episode in episodes} == {StopReason.END_TOKEN}
    assert all(episode.success for episode in episodes)
