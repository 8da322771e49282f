"""A worker's end of the pipe. Imports nothing but the standard library: it also runs in other interpreters."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[dict[str, Any]], tuple[str, Answer]]) -> None:
    """Start an engine with the settings in `sys.argv[1]`, JSON, and answer jobs until the pipe closes.

    `start` returns the engine's version and the function that answers a job.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Libraries, and processes that they start, print where the answers would go.
    os.dup2(2, 1)
    version, answer = start(json.loads(sys.argv[1]))
    print(json.dumps({"version": version}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)
