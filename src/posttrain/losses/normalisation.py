"""The one divisor of the loss, global over an optimizer step, so that any split of it has the same gradient."""

from collections.abc import Sequence
from typing import Literal

Normaliser = Literal["token", "sequence", "constant"]


def token_weights(kind: Normaliser, lengths: Sequence[int], constant: float | None = None) -> tuple[list[float], float]:
    """Weight of each stream's tokens, and the divisor of their weighted sum.

    `lengths`: sampled tokens of *all* streams of the optimizer step, also of those left out of the computation.

    - `token`: weight 1, divisor sum of lengths (DAPO, arXiv 2503.14476). Biased: the divisor is random and goes with
      the returns where lengths do.
    - `sequence`: weight 1 / length, divisor number of streams with sampled tokens (GRPO, arXiv 2402.03300). Biased:
      a short answer's tokens move the policy more than a long one's.
    - `constant`: weight 1, divisor `constant` (Dr. GRPO, arXiv 2503.20783). Unbiased up to that constant.

    ValueError when `constant` is needed and not given. A step without sampled tokens gets divisor 1.
    """
    if kind == "sequence":
        return [1.0 / n if n else 0.0 for n in lengths], float(sum(n > 0 for n in lengths) or 1)
    if kind == "token":
        return [1.0] * len(lengths), float(sum(lengths) or 1)
    if constant is None:
        raise ValueError("the normaliser `constant` needs its constant")
    return [1.0] * len(lengths), constant
