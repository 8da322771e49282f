"""What a side is asked to do, and the settings in which sides differ."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Stage = Literal["sft", "reward", "dpo", "rloo", "grpo"]

LEARNING_RATES: dict[Stage, float] = {"sft": 2e-5, "reward": 1e-4, "dpo": 1e-6, "rloo": 1e-6, "grpo": 1e-6}
"""TRL's defaults, on every side."""
LONGEST = 1024
"""Maximum number of tokens of a row on every side: TRL's default."""
LONGEST_ANSWER = 256
"""Maximum number of tokens sampled in an answer."""
KL = {"rloo": 0.05, "grpo": 0.0}
"""KL coefficients: TRL's defaults."""


MIXED, PLAIN = "f32 weights, bf16 autocast", "f32 weights and arithmetic"


@dataclass(frozen=True)
class Side:
    """One system with one group of settings."""

    name: str
    system: Literal["posttrain", "trl"]
    about: str
    """Weights and arithmetic, for the table; posttrain's run tells."""
    precision: Literal["float32", "mixed"]
    settings: dict[str, Any] = field(default_factory=dict)
    """posttrain: values of recipe keys, dotted. TRL: arguments of its configuration, over its defaults."""
    default: bool = False
    """TRL with its defaults."""


@dataclass(frozen=True)
class Job:
    """A run of `warmup` + `steps` optimizer steps."""

    stage: Stage
    model: str
    """Directory of the model."""
    rows: str
    """JSON lines: enough rows for every step, so that none comes twice."""
    warmup: int
    steps: int
    rows_per_step: int
    """Rows or pairs of an optimizer step; in RL answers."""
    group: int
    """RL: answers to one prompt."""
    seed: int
    """Orders the rows; sides of a round share it."""
    settings: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


OURS = [
    Side("posttrain auto", "posttrain", "", "mixed", {"model.dtype": "auto"}),
    Side("posttrain float32", "posttrain", "", "float32", {"model.dtype": "float32"}),
    Side("posttrain bfloat16", "posttrain", "", "mixed", {"model.dtype": "bfloat16"}),
]
WEIGHTS = {"bfloat16": "bf16 weights, f32 masters", "float32": PLAIN}
"""What `model.dtype` came out as -> for the table."""
TRL_DEFAULT = Side("TRL defaults", "trl", f"{MIXED}, checkpointing", "mixed", default=True)


def tuned(name: str, precision: Literal["float32", "mixed"], **settings: Any) -> Side:
    """TRL without gradient checkpointing and with `settings`."""
    chosen = {"gradient_checkpointing": False, "bf16": precision == "mixed", **settings}
    return Side(f"TRL {name}", "trl", MIXED if precision == "mixed" else PLAIN, precision, chosen)


def read_job(values: dict[str, Any]) -> Job:
    """The job that `as_json` made; other keys (place, threads) are left out."""
    return Job(**{key: values[key] for key in Job.__dataclass_fields__})


def share_of_letters(answer: str) -> float:
    """The reward in RL, which differs for nearly every answer: the share of `a` to `m` among its characters."""
    return sum("a" <= character <= "m" for character in answer.lower()) / max(1, len(answer))


def of_completions(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """`share_of_letters` for TRL: each completion is a list of one message."""
    return [share_of_letters(messages[0]["content"]) for messages in completions]
