"""Tools of environments: their descriptions, calls that work and calls that fail, and episodes with them."""

from typing import Annotated, Literal

import pytest

from posttrain.data.tools import parse_hermes
from posttrain.environments.make import make_env
from posttrain.environments.tools import ToolCalls, ToolFailure, calling, tool
from posttrain.episode import Outcome
from posttrain.errors import InputError
from posttrain.recipe.components import environment_recipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes
from posttrain.training.rollouts import RolloutBatch, rollout_metrics
from posttrain_environments.tool_use import ToolUse, calculate

from .script import RENDERER, TOKENIZER, Script


def weather(
    city: Annotated[str, "as in English"], days: int = 1, unit: Literal["C", "F"] = "C"
) -> dict[str, int | str]:
    """The weather of the next
    days.

    More text.
    """
    if city == "Atlantis":
        raise ValueError("no such city")
    if city == "Hell":
        raise OSError("hot")
    return {"city": city, "days": days, "unit": unit}


def test_a_function_becomes_a_tool():
    made = tool(weather)
    properties = {
        "city": {"description": "as in English", "type": "string"},
        "days": {"default": 1, "type": "integer"},
        "unit": {"default": "C", "enum": ["C", "F"], "type": "string"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    function = {"name": "weather", "description": "The weather of the next days.", "parameters": parameters}
    assert made.schema == {"type": "function", "function": function}
    assert made.call({"city": "Bern", "days": "2"}) == '{"city": "Bern", "days": 2, "unit": "C"}'
    with pytest.raises(OSError, match="hot"):
        tool(weather).call({"city": "Hell"})

    def find(place):
        """Find."""

    with pytest.raises(InputError, match="`place` of the tool find has no type"):
        tool(find)
    with pytest.raises(InputError, match="named parameters only"):
        tool(print)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "`city`: Field required"),
        ({"city": "Bern", "days": "many"}, "`days`: Input should be a valid integer"),
        ({"city": "Bern", "hour": 3}, "`hour`: Extra inputs are not permitted"),
        ({"city": "Bern", "unit": "K"}, "`unit`: Input should be 'C' or 'F'"),
        ({"city": "Atlantis"}, "no such city"),
    ],
)
def test_a_wrong_call_fails_with_its_reason(arguments, reason):
    with pytest.raises(ToolFailure, match=reason):
        tool(weather).call(arguments)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * 3 + 4", 10), ("-(7 - 9)", 2), ("2 ** 3", None), ("1 / 2", None), ("+", None), ("a", None)],
)
def test_the_calculator(expression, value):
    if value is None:
        with pytest.raises(ValueError, match="expression"):
            calculate(expression)
    else:
        assert calculate(expression) == value


def environment(**keys):
    made = ToolUse(environment_recipe({"type": "tool_use", **keys}))
    made.reset(1)
    return made


def test_calls_run_in_order_and_malformed_ones_not_at_all():
    step = environment().step(
        calling(("calculator", {"expression": "2 * 3"}), ("price", {"item": "cow"}), ("sell", {}))
    )
    assert [(m["role"], m["name"], m["content"]) for m in step.messages] == [
        ("tool", "calculator", "6"),
        ("tool", "price", "Error: there is no item 'cow'"),
        ("tool", "sell", "Error: there is no tool 'sell'; use price, calculator"),
    ]
    assert len({message["tool_call_id"] for message in step.messages}) == 3
    assert (step.reward, step.info["failed_calls"]) == (-0.1, 2)
    assert "there is no item" in step.info["rejected"]
    made = environment()
    step = made.step(calling(("price", {"item": "lamp"})) + "<tool_call>{'name': 1}</tool_call>")
    (message,) = step.messages
    assert message["role"] == "user"
    assert message["content"].startswith("No tool was called: a tool call is not valid JSON")
    assert step.info == {"rejected": message["content"].removeprefix("No tool was called: ").removesuffix(".")}
    assert (step.reward, made._seen) == (-0.1, set())
    made = environment(max_turns=2)
    assert not made.step(calling(("price", {"item": "lamp"}))).truncated
    last = made.step(calling(("price", {"item": "lamp"})))
    assert (last.truncated, last.info["success"]) == (True, False)
    with pytest.raises(RuntimeError):
        made.step("1")


def test_a_result_that_no_tokenizer_takes_is_replaced():
    def broken() -> str:
        """Broken."""
        return "a\ud800b"

    step = ToolCalls([broken], 3, 0.0).step(parse_hermes(calling(("broken", {}))))
    assert step is not None
    assert step.messages[0]["content"] == "a?b"


def test_an_episode_keeps_the_sampled_calls_and_counts_them():
    """The spaces of a sampled call are not those of the template, and stay."""
    spaced = '<tool_call>\n{"name":"calculator",  "arguments":{"expression":"2*3"}}</tool_call>'
    right = str(environment()._right)
    engine = Script(spaced, "<tool_call>{}</tool_call>", calling(("price", {"item": "cow"})), right)
    parts = {"engine": engine, "renderer": RENDERER, "environment": make_env("tool_use"), "version": 0}
    limits = RolloutRecipe(tokens_per_turn=400, tokens_per_episode=8000)
    worker = RolloutWorker(rollout=limits, sampling=SamplingRecipe(), **parts)
    (episode,) = collect_episodes(worker, [EpisodeRequest(1, 0, 0, (0, "test"))])
    assert (episode.outcome, episode.success) == (Outcome.TERMINATED, True)
    assert episode.total_reward == pytest.approx(0.8)
    (stream,) = episode.streams
    text = TOKENIZER.decode(stream.ids)
    assert spaced in text
    assert '"name": "price", "description": "The price of an item."' in text
    assert "<tool_response>\n6\n</tool_response>" in text
    for turn, request in zip(episode.turns, engine.requests, strict=True):
        assert tuple(stream.ids[: turn.start]) == request.prompt_ids
    assert [turn.info["tool_calls"] for turn in episode.turns] == [1, 0, 1, 0]
    metrics = rollout_metrics(RolloutBatch([episode], [episode]))
    assert (metrics["tools/calls"], metrics["tools/failed_share"], metrics["rollout/rejected_share"]) == (2, 0.5, 0.5)
    assert metrics["tools/malformed_share"] == pytest.approx(1 / 3)
