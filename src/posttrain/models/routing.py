"""Routers of models with experts: which experts the tokens of a pass go to, and replay of the choices of a rollout.

A router is a module that transformers itself declares as the source of router logits, and that chooses the experts of each
token by one `topk` over all of them. That call is where choices are read and, in replay, given: everything else in the router
is its own code, so weights of experts have the family's formula and its gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from posttrain.models.forward import alone_output, base_decoder, path_of
from posttrain.models.layers import lengths_of


@dataclass
class RoutedTokens:
    """What the R routers of a model, each with E experts, did with the T tokens of a pass."""

    logits: list[torch.Tensor]
    """R x [T, E], differentiable."""
    choices: list[torch.Tensor]
    """R x [T, k] int64: the experts of each token."""
    changed: list[torch.Tensor]
    """R x [T] bool: whether replay gave the token other experts than the router would choose."""
    weights: torch.Tensor | None = None
    """[T] float32: in how many streams of the row a token is; None means 1."""

    def stacked(self) -> np.ndarray:
        """The choices [T, R, k] in the smallest integer type that also has -1."""
        dtype = np.min_scalar_type(-self.logits[0].shape[-1])
        return torch.stack(self.choices, 1).cpu().numpy().astype(dtype)

    def counts(self) -> torch.Tensor:
        """[R, E + 2] float32: tokens of each expert, then all tokens and those whose experts replay changed."""
        experts, weights = self.logits[0].shape[-1], self._weights()
        rows = []
        for choices, changed in zip(self.choices, self.changed, strict=True):
            spread = weights[:, None].expand_as(choices).reshape(-1)
            tokens = weights.new_zeros(experts).scatter_add_(0, choices.reshape(-1), spread)
            rows.append(torch.cat([tokens, weights.sum()[None], (weights * changed).sum()[None]]))
        return torch.stack(rows)

    def balancing_loss(self, counts: torch.Tensor) -> torch.Tensor:
        """The part of these tokens in E sum_e f_e p_e: f_e is the share of tokens that go to expert e and p_e its mean
        probability, both over all routers and all tokens of an update, whose `counts` are given.

        Added up over the passes of an update, this is `load_balancing_loss_func` of transformers for all its tokens at once:
        equations (4) to (6) of Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, with f over the whole batch as in
        Qiu et al. 2025, arXiv 2501.11873.
        """
        experts, rows = self.logits[0].shape[-1], counts[:, -2].sum()
        probabilities = sum((self._weights()[:, None] * logits.float().softmax(-1)).sum(0) for logits in self.logits)
        return experts * (counts[:, :experts].sum(0) / rows * probabilities / rows).sum()

    def _weights(self) -> torch.Tensor:
        ones = self.logits[0].new_ones(len(self.logits[0]), dtype=torch.float32)
        return ones if self.weights is None else self.weights


class Routing:
    """The routers of one model. Passes are not concurrent: another thread computes with a copy of the model."""

    def __init__(self, names: list[str]) -> None:
        """`names`: those of the routers' modules."""
        self.layers = [next(int(part) for part in name.split(".") if part.isdigit()) for name in names]
        """The layer of each router."""
        self._record: RoutedTokens | None = None
        self._given: torch.Tensor | None = None

    @contextmanager
    def recorded(self) -> Iterator[RoutedTokens]:
        """What the routers do in the pass inside the block."""
        self._record = record = RoutedTokens([], [], [])
        try:
            yield record
        finally:
            self._record = None

    @contextmanager
    def row(self, choices: torch.Tensor | None, weights: torch.Tensor | None) -> Iterator[None]:
        """Compute the T tokens of a row inside the block with the given `choices` [T, R, k], where -1 leaves a token to its
        router. With a gradient they are kept for layers that are recomputed in the backward pass, until `forget`."""
        self._given = choices
        if self._record is not None:
            self._record.weights = weights
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                self.forget()

    def forget(self) -> None:
        """Let the routers choose again."""
        self._given = None

    def run(self, router: "_Router", compute: Callable[[], Any]) -> Any:
        """The output of `router`, which `compute` returns."""
        record, given = self._record, self._given
        if record is None and given is None:
            return compute()
        with _Choice(router.experts, None if given is None else given[:, router.place].long()) as choice:
            out = compute()
        if record is not None:
            record.logits.append(out[router.logits_at].reshape(-1, router.experts))
            record.choices.append(choice.made)
            record.changed.append(choice.changed)
        return out


class _Choice(TorchFunctionMode):
    """Reads the result of the one `topk` over all `experts`, or replaces it by `given` [T, k]."""

    def __init__(self, experts: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self.experts, self.given = experts, given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self.experts:
            return out
        values, chosen = out
        self.made, self.changed = chosen, chosen.new_zeros(len(chosen), dtype=torch.bool)
        if self.given is not None:
            self.made = torch.where(self.given >= 0, self.given, chosen)
            self.changed = (self.made.sort(-1).values != chosen.sort(-1).values).any(-1)
            values = args[0].gather(1, self.made)
        return torch.return_types.topk((values, self.made))


class _Router(torch.nn.Module):
    """A router of transformers whose choices go through `routing`."""

    routing: Routing
    place: int
    experts: int
    logits_at: int

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.routing.run(self, lambda: super(_Router, self).forward(*inputs, **named))


def use_routing(model: torch.nn.Module) -> None:
    """Let passes of `model`, a model of transformers whose forward path is chosen, read and replay the choices of its routers
    (`forward.routing_of`). No effect on a model without routers, or with one that does not choose as described above."""
    declared = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    recorders = [one["router_logits"] for one in declared if hasattr(one.get("router_logits"), "target_class")]
    places = {recorder.target_class: recorder.index for recorder in recorders}
    routers: dict[str, Any] = {name: module for name, module in model.named_modules() if type(module) in places}
    if not routers or not path_of(model).packed or lengths_of(base_decoder(model)) is not None:
        return
    routing = Routing(list(routers))
    # The arguments of each router in a pass of three tokens: some take more than hidden states.
    given: dict[torch.nn.Module, Any] = {}
    with ExitStack() as hooks, torch.no_grad():
        for router in routers.values():
            keep = router.register_forward_pre_hook(lambda *call: given.update({call[0]: call[1:]}), with_kwargs=True)
            hooks.callback(keep.remove)
        alone_output(model, torch.arange(3, device=next(model.parameters()).device))
    for place, router in enumerate(routers.values()):
        cls, at, (inputs, named) = type(router), places[type(router)], given[router]
        with torch.no_grad():
            experts = router(*inputs, **named)[at].shape[-1]
            with _Choice(experts, None) as choice:
                router(*inputs, **named)
            if not hasattr(choice, "made"):
                return
            with _Choice(experts, (choice.made + 1) % experts) as other:
                out = router(*inputs, **named)
        tensors = [part for part in out if isinstance(part, torch.Tensor)]
        if not any(part.shape == other.made.shape and torch.equal(part.long(), other.made) for part in tensors):
            return
        router.__class__ = type(cls.__name__, (_Router, cls), {"__module__": __name__})
        router.routing, router.place, router.experts, router.logits_at = routing, place, experts, at
    model.routing = routing  # type: ignore[assignment]
