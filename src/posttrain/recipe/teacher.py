"""The teacher of a distillation: a model, a server, or the policy itself with additional text in its prompt."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.base import BaseConfig, Connects, Mark, Reads, Text
from posttrain.recipe.metrics import Metric
from posttrain.recipe.model import Dtype, ModelRecipe, dtype_bytes
from posttrain.recipe.needs import needs
from posttrain.recipe.plan import Items, Plan

CONTEXT_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
"""A field in `teacher.context`; other braces are text."""


class TeacherRecipe(BaseConfig):
    """A model that scores the tokens that the policy sampled. Set one of `path`, `urls` and `policy`. The teacher has the policy's tokenizer."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("teacher/reverse_kl", "mean of log policy - log teacher at sampled tokens, nats"),
        Metric("teacher/logprob", "mean log-probability of sampled tokens under the teacher"),
        Metric("teacher/agreement", "share of sampled tokens that the teacher ranks first"),
        Metric("teacher/failed", "episodes without scores of the teacher"),
        Metric("teacher/without_context", "episodes without a field that `teacher.context` needs"),
    )

    path: Reads | None = None
    """Directory, hub id, `.gguf` file or `packaged:` name of the teacher. In a pipeline, `stage:NAME`."""
    urls: list[Connects] = []
    """Base URLs of servers with the teacher, for example `http://localhost:8000/v1`; requests are divided among them. They score prompts given as token ids, see `protocol`."""
    policy: Annotated[Literal["initial", "current"] | None, needs("context", refused=True)] = None
    """The policy is its own teacher and sees `context`. `initial`: its weights before training (OPSD; Zhao et al. 2026, arXiv 2601.18734). `current`: its weights at the start of each step (SDPO; Hübotter et al. 2026, arXiv 2601.20802)."""
    context: Text | None = None
    """Text that is added to the last user message of the first observation in the teacher's prompt alone. `{reference}` is the action of the environment's expert, `{success}` an answer of another episode of the group that succeeded, `{feedback}` the text in the last turn's `info["feedback"]`, and any other field a column of the task's row. An episode that lacks a field is not trained on, and is counted."""
    dtype: Dtype = None
    """Precision of the model at `path`, as `model.dtype`. Null: bfloat16 on a GPU, float32 on a CPU."""
    tokens_per_batch: int = Field(4096, ge=16)
    """Maximum number of tokens in one forward pass of the teacher in this process."""
    model: Annotated[Text | None, needs("urls", refused=True)] = None
    """Model name to send to the servers. Null: the first model that the server lists."""
    protocol: Annotated[Literal["prompt_logprobs", "echo"], needs("urls", refused=True)] = "prompt_logprobs"
    """How the servers return log-probabilities of a prompt. `prompt_logprobs`: the field of vLLM. `echo`: the fields `echo` and `logprobs` of OpenAI completions."""
    api_key_variable: Annotated[Annotated[str | None, Mark("connects", "urls")], needs("urls", refused=True)] = None
    """Name of the environment variable that holds the API key of the servers. Null: send a placeholder key."""
    timeout: Annotated[float, needs("urls", refused=True)] = Field(120, gt=0)
    """Timeout of one request in seconds, from sending it to the end of the response. Redirects to another server are not followed."""
    retries: Annotated[int, needs("urls", refused=True)] = Field(3, ge=0)
    """Retries after a timeout, a lost connection, or status 408, 409, 429 or 5xx, with exponential backoff."""
    max_concurrent: Annotated[int, needs("urls", refused=True)] = Field(8, ge=1)
    """Maximum number of concurrent requests."""

    def _check(self) -> None:
        given = [key for key in ("path", "urls", "policy") if getattr(self, key)]
        if len(given) != 1:
            problem = f"{' and '.join(f'`{key}`' for key in given)} are set" if given else "there is no teacher"
            raise ValueError(f"{problem}; set one of `path`, `urls` and `policy`")
        if self.context is not None and not self.context.strip():
            raise ValueError("`context` is empty; write the text, or remove it")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`urls` contains {url}; it must begin with http:// or https://")

    @property
    def fields(self) -> list[str]:
        """Names of the fields in `context`, each once."""
        return list(dict.fromkeys(CONTEXT_FIELD.findall(self.context or "")))

    def memory_items(self, plan: Plan, policy: ModelRecipe) -> Items:
        """The weights of the teacher of `policy` in this process."""
        if self.path is not None:
            width, known = dtype_bytes(self.dtype), plan.sizes_at(self.path)
            count = (known or plan.sizes).parameters
            how = f"{count:,} parameters of {width} bytes" if known else "assuming the size of the policy"
            return {"teacher": (width * count, how)}
        if self.policy == "initial" and policy.lora is None:
            return {"teacher": (policy.weight_bytes * plan.sizes.parameters, "a copy of the initial model")}
        return {"teacher": (0, "on its servers" if self.urls else "the policy itself")}


class RewardTeacherRecipe(TeacherRecipe):
    """A teacher whose distance from the policy is subtracted from the reward of each sampled token (on-policy distillation inside `rl`)."""

    coefficient: float = Field(1.0, gt=0)
    """Reward per nat: each sampled token gets coefficient x (log teacher - log policy), whose mean is -coefficient x KL(policy, teacher)."""


def refuse_other_temperature(teacher: TeacherRecipe, temperature: float) -> None:
    """ValueError if a policy samples at a temperature other than 1 but the teacher's servers score at 1."""
    if teacher.urls and temperature != 1:
        heat = (
            f"`rollout.sampling.temperature` is {temperature:g}; set it to 1, or load the teacher with `teacher.path`"
        )
        raise ValueError(f"servers return log-probabilities at temperature 1, and {heat}")
