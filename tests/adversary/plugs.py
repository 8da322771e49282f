"""Installed plug-ins that raise, exit, print escapes, shadow built-in names or are not what they declare, and
environments that attack their audit.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import random
import re
import sys
import time
from functools import partial
from pathlib import Path

from posttrain.cli.env import environment_of
from posttrain.environments.audit import AuditProcesses, audit
from posttrain.environments.players import PLAYERS
from tests.adversary import hardship

_BODIES = ["raise RuntimeError('\\x1b[2J' + 'x' * 99_999)", "raise SystemExit(0)"]
_BODIES += ["import sys; sys.exit('\\x1b]0;owned\\x07')", "raise ImportError('\\n' * 99)"]
_BODIES += ["import no_such_package_anywhere", "raise BaseException('odd')", "def f(): f()\nf()"]
_BODIES += ["print('\\x1b[2J\\u202eevil')\nThing = 5", "Thing = None", "class Thing:\n    Recipe = 5"]
_BODIES += ["def Thing(*a, **k):\n    raise SystemExit(0)", "(", ""]
_GROUPS = ("environments", "commands", "losses", "credits", "models", "recipes")
_SHADOWED = ("bandit", "report", "ppo", "gae", "data.inspect", "env", "rl")
_COMMANDS = [["--help"], ["env", "list"], ["recipe"], ["rl", "environment.type=NAME", "--dry-run"]]
_COMMANDS += [["rl", "environment.type=bandit", "loss.type=NAME", "--dry-run"]]
_COMMANDS += [["rl", "environment.type=bandit", "model.path=made:NAME", "--dry-run"], ["rl", "NAME/x", "--dry-run"]]
_COMMANDS += [["NAME"], ["NAME", "--help"], ["env", "validate", "NAME"], ["env", "validate", "file.py"]]
_COMMANDS += [["env", "audit", "file.py", "--seeds", "1"]]


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
    most = 300_000 if words == ["recipe"] else 60_000  # it lists every key
    assert len(said) < most, f"{len(said)} characters: {what[:900]}"
    if "file.py" in words:
        assert code != 0, what
    if words[0] == name == "report":
        assert "RUN" in said, f"a plug-in is a built-in command: {what}"
    if code and (re.search("plug|evil_module", said) is None) and words[0] != "--help":
        assert "posttrain: " in said or "Usage" in said or "Error" in said, what


_ENVIRONMENT = """
import json, os, signal, sys, time
from posttrain.environments.protocol import Environment, Observation, Step
class Evil(Environment):
    def reset(self, seed):
        {reset}
        return Observation([{{"role": "user", "content": "x"}}])
    def step(self, action):
        {step}
        return Step([], 0.0, True, False, {{"success": False}})
"""
_REPORTS = "[os.write(n, {!r}) for n in range(3, 30) if os.path.exists(f'/proc/self/fd/{{n}}')]"
_DEEDS = (
    "os.write(1, b'y' * (1 << 25))",
    "[os.write(1, b'y' * 4096) for _ in iter(int, 1)]",
    "os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '30')",
    "os.kill(os.getpid(), signal.SIGSTOP)",
    "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGABRT, signal.SIGTERM)]; time.sleep(60)",
    "os._exit(0)",
    "sys.exit('\\x1b[2Jbye')",
    "raise KeyboardInterrupt",
    "raise BaseException('odd')",
    "raise ValueError('\\ud800\\x1b[2J' + 'x' * (1 << 20))",
    "raise MemoryError",
    "os.closerange(0, 64)",
    "json.dumps = lambda *a, **k: 5",
    *(
        _REPORTS.format(line)
        for line in (b"[]\n", b'{"player": 3}\n', b"5 x\n", b"[" * 999 + b"\n", b'"ok"\n', b"null\n", b"\xff\n")
    ),
)


def audited(seed: int, folder: Path) -> None:
    """An environment that attacks the process of its audit is a defect, within the time and without escapes."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    places = {"reset": "pass", "step": "pass"} | {draw.choice(("reset", "step")): draw.choice(_DEEDS)}
    file = folder / "environment.py"
    file.write_text(_ENVIRONMENT.format(**places))
    begun = time.monotonic()
    with AuditProcesses(6) as processes:
        report = audit(str(file), environment_of(str(file), []), range(1), list(PLAYERS), processes)
    what = f"{places}: {report.findings}"
    harmless = not any(
        text in str(places) for text in ("kill", "exit", "raise", "close", "sleep(", "iter(", "dumps", "exists")
    )
    assert bool(report.defects) or harmless, what
    assert re.search(r"\x1b|\ud800", report.as_json() + what) is None, what
    assert len(what) < 20_000, len(what)
    assert time.monotonic() - begun < 90, what
