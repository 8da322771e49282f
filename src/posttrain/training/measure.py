"""What a stage measures on held-out data, and the tables that come of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posttrain.runs.tables import Table

START = "start of this run"
TRAINED = "trained"
EVALUATED = "evaluated"


class Measure(Protocol):
    """One kind of held-out measurement. Values are those of a line of the metrics log; keys of two kinds differ."""

    def references(self) -> dict[str, dict[str, Any]]:
        """Player -> values of what the model is compared with: random and optimal players, where there are any."""
        ...

    def curve(self, step: int) -> dict[str, Any]:
        """Values of the learning curve, on the data that chooses the best checkpoint."""
        ...

    def final(self, step: int) -> dict[str, Any]:
        """Values of the final table, on data that no choice is made on."""
        ...

    def cost(self) -> str:
        """What `final` will do, in words for the display."""
        ...

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """The final tables from the metrics lines of kind `baseline` and `final`, by player."""
        ...

    def artefacts(self) -> Sequence[str]:
        """Lines to print after the final table, such as scored samples; usually none."""
        ...
