"""Installed plug-ins that raise, exit, print escapes, shadow built-in names or are not what they declare.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import random
import re
import sys
from functools import partial
from pathlib import Path

from tests.adversary import hardship

_BODIES = (
    "raise RuntimeError('\\x1b[2J' + 'x' * 99_999)",
    "raise SystemExit(0)",
    "import sys; sys.exit('\\x1b]0;owned\\x07')",
    "raise ImportError('\\n' * 99)",
    "import no_such_package_anywhere",
    "raise BaseException('odd')",
    "def f(): f()\nf()",
    "print('\\x1b[2J\\u202eevil')\nThing = 5",
    "Thing = None",
    "class Thing:\n    Recipe = 5",
    "def Thing(*a, **k):\n    raise SystemExit(0)",
    "(",
    "",
)
_GROUPS = ("environments", "commands", "losses", "credits", "models", "recipes")
_SHADOWED = ("bandit", "report", "ppo", "gae", "data.inspect", "env", "rl")
_COMMANDS = (
    ["--help"],
    ["env", "list"],
    ["recipe"],
    ["rl", "environment.type=NAME", "--dry-run"],
    ["rl", "environment.type=bandit", "loss.type=NAME", "--dry-run"],
    ["rl", "environment.type=bandit", "model.path=made:NAME", "--dry-run"],
    ["rl", "NAME/x", "--dry-run"],
    ["NAME"],
    ["NAME", "--help"],
    ["env", "validate", "NAME"],
    ["env", "validate", "file.py"],
    ["env", "audit", "file.py", "--seeds", "1"],
)


def plugins(seed: int, folder: Path) -> None:
    """A command with a broken plug-in, or an environment file of the same kind, ends with a sentence or without it."""
    draw = random.Random(seed)
    place = folder / "place"
    installed = folder / "site" / "evil-1.0.dist-info"
    for made in (place, installed):
        made.mkdir(parents=True)
    name = draw.choice([*_SHADOWED, "evil", "evil", "evil", "evil", "e.vil", "\u202eevil", "../evil"])
    group = draw.choice(_GROUPS)
    body = draw.choice(_BODIES)
    (place / "file.py").write_text(body)
    (installed.parent / "evil_module.py").write_text(body)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[posttrain.{group}]\n{name} = evil_module:Thing\n")
    words = [word.replace("NAME", name) for word in draw.choice(_COMMANDS)]
    code, said = hardship.run(words, place, (), partial(sys.path.append, str(installed.parent)))
    what = f"{words} with the {group} {name!r}, {body!r}: exit code {code}: {said[-900:]}"
    assert code in (0, 1, 2), what
    assert re.search(r"Traceback|with --debug|\x1b\[2J|\x1b\]|\u202e", said) is None, what
    assert len(said) < 60_000, f"{len(said)} characters: {what[:900]}"
    if "file.py" in words:
        assert code != 0, what
    if words[0] == name == "report":
        assert "RUN" in said, f"a plug-in is a built-in command: {what}"
    if code and (re.search("plug|evil_module", said) is None) and words[0] != "--help":
        assert "posttrain: " in said or "Usage" in said or "Error" in said, what
