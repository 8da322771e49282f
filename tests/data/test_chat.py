"""Loss masks of written conversations, over the chat templates that real models use."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.rendering import Renderer, render_conversation
from posttrain.errors import InputError
from posttrain.recipe.components import environment_recipe
from posttrain.recipe.stages import SftRecipe
from posttrain.training.experts import expert_episodes, expert_rows
from tests.conftest import CHATML
from tests.data.tokenizers import renderer

DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('</think>')[-1].lstrip('\n') }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def real_templates() -> dict[str, str]:
    """Name -> template of the models that trl knows; empty where it is not installed."""
    try:
        import trl
    except ImportError:
        return {}
    folder = Path(trl.__file__).parent / "chat_templates"
    return {f.stem: f.read_text() for f in sorted(folder.glob("*.jinja")) if not f.stem.endswith("_training")}


@st.composite
def conversations(draw):
    """Turns with distinct words: in turn 3 the user writes `u3x`, the answer is `a3x` and the thought `t3x`."""
    messages = [{"role": "system", "content": "s0x"}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": f"u{turn}x say"})
        thought = f"<think>\nt{turn}x\n</think>\n\n" if draw(st.booleans()) else ""
        message = {"role": "assistant", "content": f"{thought}a{turn}x"}
        if draw(st.integers(0, 3)) == 0:
            message["train"] = False
        messages.append(message)
    return messages


def check_masks(subject: Renderer, messages: list[dict], loss_on: str) -> int:
    """Each trained answer is trained once, after exactly the prompt of its time; returns how many there are."""
    tokenizer = subject.tokenizer
    wanted = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train", True)]
    wanted = wanted[-1:] if loss_on == "last_assistant" else wanted
    plain = [{k: v for k, v in m.items() if k != "train"} for m in messages]

    def shown(part: list[dict]) -> list[dict]:
        if subject.folds_system and part[0]["role"] == "system":
            return [{**part[1], "content": f"{part[0]['content']}\n\n{part[1]['content']}"}, *part[2:]]
        return part

    found = []
    for stream in render_conversation(subject, messages, loss_on):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], stream.trained, [0]])))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            place = wanted[len(found)]
            before = tokenizer.decode(stream.ids[:start], skip_special_tokens=False)
            asked = tokenizer.apply_chat_template(shown(plain[:place]), tokenize=False, add_generation_prompt=True)
            assert before == asked
            said = tokenizer.decode(stream.ids[start:stop], skip_special_tokens=False)
            turn = messages[place]["content"].split("a")[-1]
            assert said.count(f"a{turn}") == 1
            assert said.endswith(tokenizer.eos_token)
            others = [word for t in range(5) for word in (f"u{t}x", f"a{t}x", f"t{t}x", "s0x") if t != int(turn[0])]
            assert not any(word in said for word in others)
            # A thought that the template shows in the last answer is trained with it.
            whole = tokenizer.apply_chat_template(shown(plain[: place + 1]), tokenize=False)
            if f"t{turn}" in whole:
                assert f"t{turn}" in said
            found.append(place)
    assert found == wanted
    return len(found)


@settings(max_examples=40, deadline=None)
@given(messages=conversations(), loss_on=st.sampled_from(["assistant", "last_assistant"]))
@pytest.mark.parametrize("template", [CHATML, DROPS_THINKING], ids=["chatml", "drops_thinking"])
def test_masks_cover_exactly_the_answers(template, messages, loss_on):
    check_masks(renderer(template), messages, loss_on)


def _check_over_examples(subject: Renderer) -> int:
    """Answers checked in conversations, with a system message or without."""
    count = [0]

    @settings(max_examples=8, deadline=None, database=None)
    @given(messages=conversations(), loss_on=st.sampled_from(["assistant", "last_assistant"]))
    def check(messages, loss_on):
        count[0] += check_masks(subject, messages, loss_on)

    check()
    return count[0]


def test_masks_cover_exactly_the_answers_in_the_templates_of_real_models():
    templates = real_templates()
    if not templates:
        pytest.skip("trl, which brings the templates of real models, is not installed")
    refused, checked = [], {}
    for name, template in templates.items():
        try:
            subject = renderer(template)
        except InputError:
            refused.append(name)
            continue
        checked[name] = _check_over_examples(subject)
    assert len(refused) <= 6, refused
    assert len(checked) >= 30
    assert min(checked.values()) > 0
    assert {"qwen3", "qwen2_5", "llama3", "deepseekv3", "gemma", "phi3"} <= set(checked)


def test_streams_of_dropped_thinking_of_all_tokens_and_of_nothing():
    messages = [
        {"role": "user", "content": "u0x"},
        {"role": "assistant", "content": "<think>\nt0x\n</think>\n\na0x"},
        {"role": "user", "content": "u1x"},
        {"role": "assistant", "content": "a1x"},
    ]
    streams = render_conversation(renderer(DROPS_THINKING), messages, "assistant")
    assert len(streams) == 2
    assert len(render_conversation(renderer(CHATML), messages, "assistant")) == 1
    (stream,) = render_conversation(renderer(CHATML), [{"role": "user", "content": "u0x"}], "all")
    assert stream.trained.tolist() == [False] + [True] * (len(stream.ids) - 1)
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "train": False}]
    assert render_conversation(renderer(CHATML), messages, "assistant") == []


@pytest.mark.parametrize("thinking", [False, True])
def test_expert_rows_are_the_episodes_that_rl_would_play(thinking):
    """Law 2: a trace from a file has the tokens and the mask of the same trace played through the rollout."""
    environment = {"type": "frozen_lake", "format": {"thinking": thinking}}
    recipe = SftRecipe(environment=environment, experts={"seeds": {"start": 200_000, "count": 6}})
    subject = renderer(CHATML)
    seeds = range(200_000, 200_006)
    episodes = expert_episodes(recipe, seeds, subject)
    rows = expert_rows(environment_recipe(environment), seeds, "optimal", "episode", 0)
    assert len(rows) == len(episodes) == 6
    assert any(len(row["messages"]) > 3 for row in rows)
    for row, episode in zip(rows, episodes, strict=True):
        (stream,) = render_conversation(subject, row["messages"], "assistant")
        assert stream.ids.tolist() == episode.streams[0].ids.tolist()
        assert stream.trained.tolist() == episode.streams[0].sampled.tolist()


def test_expert_rows_by_turn_end_with_one_answer():
    rows = expert_rows(environment_recipe({"type": "frozen_lake"}), range(200_000, 200_010), "optimal", "turn", 0)
    assert all(row["completion"][0]["role"] == "assistant" and row["prompt"][-1]["role"] == "user" for row in rows)


def test_a_template_without_tools_shows_them_as_text():
    """The ChatML template has neither tools nor calls; the model would be trained on an empty answer instead."""
    subject, asked = renderer(CHATML), {"role": "user", "content": "u0x"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    rest = [{"role": "tool", "content": "r0x"}, {"role": "assistant", "content": "a0x"}]
    (stream,) = render_conversation(subject, [asked, called, *rest], "assistant", [{"name": "add"}])
    assert subject.tokenizer.decode(stream.ids[stream.trained]) == (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>a0x<|im_end|>'
    )
    assert '<tools>\n{"name": "add"}\n</tools>' in subject.tokenizer.decode(stream.ids)
    with pytest.raises(InputError, match="a tool call has no function"):
        render_conversation(subject, [asked, {**called, "tool_calls": [{}]}], "assistant")
