"""Episodes: their driver, async rollouts, filters and the store.

`posttrain.rollout` is also the public function `posttrain.rollout.driver.rollout`, so this package can be called.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that can be called: Python binds it in the parent package, where it hides the function of the same
    name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from posttrain.rollout.driver import rollout

        return rollout(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
