"""Shop questions whose prices only a lookup tool has, and whose numbers need a calculator."""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from posttrain.environments.game import play, require
from posttrain.environments.protocol import Baseline, Message
from posttrain.environments.tools import ToolEnvironment, ToolEnvironmentRecipe, calling
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream

ITEMS = ("lamp", "chair", "table", "mirror", "carpet", "shelf", "clock", "vase", "bench", "curtain", "basket", "stool")
_PLURALS = {"shelf": "shelves", "bench": "benches"}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_LONGEST = 60
"""Maximum length of an expression in characters."""


class ToolUseRecipe(ToolEnvironmentRecipe):
    """Keys of `tool_use`."""

    type: Literal["tool_use"] = "tool_use"
    """Questions that need a lookup tool and a calculator."""
    max_turns: int = 5
    """Maximum number of answers. Three suffice: prices, the sum, the answer."""


class ToolUse(ToolEnvironment):
    """A price, a sum, or the price of several things. Success is the right number.

    Prices are drawn for each task, so no policy can know them without the lookup.
    """

    Recipe = ToolUseRecipe

    @classmethod
    def return_range(cls, recipe: ToolUseRecipe) -> tuple[float, float]:
        """A penalty in every turn, or the right number in the first."""
        return recipe.max_turns * recipe.penalty, 1.0

    def begin(self, seed: int) -> list[Message]:
        random = random_stream("tool_use", seed)
        self._prices = {item: int(random.integers(11, 99)) for item in ITEMS}
        self._seen: set[str] = set()
        self._sum: int | None = None
        kind = int(random.integers(4))
        names = [str(item) for item in random.choice(ITEMS, size=2, replace=False)]
        counts = [int(random.integers(2, 10)) for _ in names]
        if kind == 0:
            self._wanted, self._expression = names[:1], ""
            question = f"What does one {names[0]} cost?"
        elif kind == 1:
            first, second, third = (int(random.integers(11, 99)) for _ in range(3))
            self._wanted, self._expression = [], f"{first} * {second} + {third}"
            question = f"What is {self._expression}?"
        else:
            self._wanted = names[: kind - 1]
            counts = counts[: kind - 1]
            self._expression = " + ".join(
                f"{count} * {self._prices[item]}" for count, item in zip(counts, self._wanted, strict=True)
            )
            things = " and ".join(
                f"{n} {_PLURALS.get(item, f'{item}s')}" for n, item in zip(counts, self._wanted, strict=True)
            )
            question = f"What do {things} cost?"
        self._right = calculate(self._expression) if self._expression else self._prices[self._wanted[0]]
        return [{"role": "user", "content": f"{question} Answer with the number only."}]

    def tools(self) -> Sequence[Callable[..., Any]]:
        return self.price, self.calculator

    def price(self, item: Annotated[str, "in the singular"]) -> str:
        """The price of an item."""
        if item not in self._prices:
            raise ValueError(f"there is no item {item[:20]!r}")
        self._seen.add(item)
        return str(self._prices[item])

    def calculator(self, expression: Annotated[str, "numbers with + - *"]) -> str:
        """Calculate."""
        self._sum = calculate(expression)
        return str(self._sum)

    def finish(self, answer: str) -> tuple[float, dict[str, Any]]:
        success = answer.strip().rstrip(".") == str(self._right)
        return float(success), {"success": success}

    def expert(self) -> str:
        """Look up all prices at once, calculate, answer. Steps that were already taken are left out."""
        if missing := [item for item in self._wanted if item not in self._seen]:
            return calling(*(("price", {"item": item}) for item in missing))
        if self._expression and self._sum != self._right:
            return calling(("calculator", {"expression": self._expression}))
        return str(self._right)

    def random_answer(self, draw: float) -> str:
        """A price of any item, or a product of two numbers. Answers are left out: a random number is never right."""
        numbers = np.random.default_rng(int(draw * 2**32))
        if draw < 0.5:
            return calling(("price", {"item": ITEMS[int(numbers.integers(len(ITEMS)))]}))
        return calling(("calculator", {"expression": f"{numbers.integers(2, 10)} * {numbers.integers(11, 99)}"}))

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """The optimal policy is always right. The random policy never is, because it only calls tools."""
        return {"random": Baseline(0.0, 0.0, len(seeds)), "optimal": Baseline(1.0, 1.0, len(seeds))}

    @classmethod
    def validate(cls, recipe: ToolUseRecipe, seeds: Sequence[int]) -> None:
        """The expert earns 1 and a wrong number 0; failed and malformed calls have the penalty."""
        environment = cls(recipe)
        for seed in seeds:
            best = play(environment, seed)
            require(
                sum(step.reward for step in best) == 1 and best[-1].info["success"], seed, "the expert does not earn 1"
            )
            wrong = play(environment, seed, [str(environment._right + 1)])[-1]
            require(wrong.reward == 0 and not wrong.info["success"], seed, "a wrong number counts as right")
            for bad in ('<tool_call>{"name": </tool_call>', calling(("price", {"item": "unicorn"}))):
                failed = play(environment, seed, [bad])[-1]
                require(
                    failed.reward == recipe.penalty and bool(failed.info["rejected"]), seed, f"{bad} is not rejected"
                )


def calculate(expression: str) -> int:
    """The value of an expression of integers with + - *. ValueError for other expressions."""
    if len(expression) > _LONGEST or not re.fullmatch(r"[0-9+\-*() ]+", expression):
        raise ValueError("an expression has numbers, + - * and parentheses only")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ValueError(f"{expression[:_LONGEST]!r} is not an expression") from None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp) and (apply := _OPERATORS.get(type(node.op))) is not None:
        return int(apply(_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("an expression has numbers, + - * and parentheses only")
