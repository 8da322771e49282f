"""One training run of a claim, and the keys that all of them share."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Keys = dict[str, Any]
Line = dict[str, Any]
"""What is stored of a run."""

COMMON: Keys = {"checkpoint": {"every": 100_000}, "evaluation": {"sampling": {"temperature": 1.0}}, "overwrite": True}


@dataclass(frozen=True)
class Run:
    """One training run of a claim."""

    claim: str
    variant: str
    seed: int
    out: Path
    tuning: bool = False
    """On the tasks on which settings are chosen."""
    keys: str = ""
    """Further keys as JSON."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return re.sub(r"\W+", "_", f"{self.claim}-{self.variant}-{self.seed}-{self.keys}")[:200]
