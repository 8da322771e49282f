"""The recipe of `posttrain evaluate harness`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import NOTHING, Executes, Text
from posttrain.recipe.engines import LocalEngineRecipe, PolicyEngineRecipe
from posttrain.recipe.run import StageRecipe


class HarnessRecipe(StageRecipe):
    """Evaluation of a model on tasks of lm-eval whose data is on this machine. Keys without a section are lm-eval's own."""

    stage: Literal["harness"] = "harness"
    """Which stage the recipe is for; `posttrain evaluate harness` takes this one."""
    tasks: Annotated[list[Executes], Field(min_length=1)]
    """Names of tasks, groups or tags, and paths of task files (.yaml): a list, or one text with commas."""
    include_path: Executes | None = None
    """Folder with further task files. Null: none."""
    num_fewshot: int | None = Field(None, ge=0)
    """Examples in each prompt. Null: as the task says."""
    limit: int | None = Field(None, ge=1)
    """Evaluate the first documents of each task. Null: all."""
    apply_chat_template: bool = False
    """Put prompts into the chat template of the model."""
    system_instruction: Text | None = None
    """System message of every prompt. Null: none."""
    gen_kwargs: Annotated[dict[str, Any], NOTHING] = {}
    """Settings of generation over those of the tasks: `max_gen_toks`, `until`, `do_sample`, `temperature`, `top_p`, `top_k`, `min_p`."""
    engine: PolicyEngineRecipe = LocalEngineRecipe()
    """Engine that generates. Likelihoods are computed by the packed forward pass of training."""
    tokens_per_batch: int = Field(4096, ge=16)
    """Maximum number of tokens per forward pass of likelihoods, or one text."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
