"""The model provider `posttrain` of inspect-ai: `inspect eval task.py --model posttrain/runs/run`.

inspect-ai imports this module through an entry point in `pyproject.toml`. `-M dtype=bfloat16` sets a key of `model`.
"""

from typing import Any

from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    messages_to_openai,
    model_output_from_openai,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from posttrain.engines.factory import open_inference_engine
from posttrain.models.policy import Policy
from posttrain.recipe.compose import section
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.rollout.agents.session import CallRefused
from posttrain.runs.directory import model_path
from posttrain.serving import Server


@modelapi(name="posttrain")
class PosttrainAPI(ModelAPI):
    """A run's model, with tools in the format of its chat template. Answers are those of `posttrain serve`."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        policy = Policy(section(ModelRecipe, path=model_path(model_name), **model_args))
        self.server = Server(open_inference_engine(policy, section(LocalEngineRecipe)), model_name)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        values = {
            "messages": await messages_to_openai(input),
            "tools": [_tool(tool) for tool in tools],
            "tool_choice": tool_choice if isinstance(tool_choice, str) else "required",
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "seed": config.seed,
            "stop": config.stop_seqs,
            "n": config.num_choices,
            "max_tokens": config.max_tokens,
            "logprobs": config.logprobs,
            "top_logprobs": config.top_logprobs,
        }
        try:
            answer = await self.server.chat({key: value for key, value in values.items() if value not in (None, [])})
        except CallRefused as error:
            if error.kind != "context_length_exceeded":
                raise
            return ModelOutput.from_content(self.model_name, str(error), stop_reason="model_length")
        return await model_output_from_openai(answer)


def _tool(tool: ToolInfo) -> dict[str, Any]:
    parameters = tool.parameters.model_dump(exclude_none=True)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }
