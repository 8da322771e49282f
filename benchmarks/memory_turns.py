"""Turns of the memory agent per second: its code through the interpreter and its tools, on vaults in memory and on disk.

A turn is one block of code of a kind that a model writes: read the note about the user and follow a link, change a
fact, add a line and look at it, list and search. Every player has its own vault and plays one turn after the
other; there are as many players as asked for, and one or more workers that run their code.
"""

import argparse
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness.options import named_sides, numbers
from harness.table import show
from harness.timing import in_turn, middle

from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.tools import tools
from posttrain_memory.vault.vault import Vault

TURNS = (
    "me = read_file('user.md')\nfriend = follow_link('[[entities/person_03]]')\ncity = [l for l in me.splitlines() if 'city' in l]",
    "text = read_file('entities/person_05.md')\nold = [l for l in text.splitlines() if l.startswith('- visits:')][0]\n"
    "n = int(old.split(': ')[1]) + 1\nok = update_file('entities/person_05.md', old, f'- visits: {n}')",
    "if get_size('log.md') > 20000:\n    delete_file('log.md')\n    create_file('log.md', '# Log')\n"
    "append_file('log.md', '- saw [[entities/person_02]]')\nlast = read_file('log.md')[-40:]",
    "tree = list_files()\nhits = search_files('harbour')",
)
"""Blocks of code, 2.25 calls of tools each on average."""
SIDES = ("memory", "disk", "disk, synced")


def files(notes: int) -> dict[str, str]:
    """A vault of `notes` notes of people, about 400 characters each, and two more."""
    found = {"user.md": "# Me\n- name: Ada\n- city: Berlin\n", "log.md": "# Log\n"}
    for number in range(notes):
        lines = [
            f"# Person {number}",
            f"- visits: {number}",
            f"- friend: [[entities/person_{(number + 1) % notes:02d}]]",
        ]
        lines += [
            f"- note {k}: a line about the harbour" if (number + k) % 17 == 0 else f"- note {k}: some text"
            for k in range(14)
        ]
        found[f"entities/person_{number:02d}.md"] = "\n".join(lines) + "\n"
    return found


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--workers", type=numbers(1), default="1,2", help="workers of the interpreter, separated by commas"
    )
    parser.add_argument("--players", type=int, default=4, help="episodes that are played at once")
    parser.add_argument("--turns", type=int, default=500, help="turns of each player")
    parser.add_argument("--notes", type=int, default=20, help="notes of people in a vault")
    parser.add_argument("--rounds", type=int, default=3, help="times that every side runs")
    parser.add_argument(
        "--sides", help=f"of {' | '.join(SIDES)}: those whose name holds one of these words, separated by commas"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    return parser.parse_args()


def play(kind: str, workers: int, chosen: argparse.Namespace, number: int) -> dict[str, Any]:
    """One side once: seconds of it all and of each turn, calls, processor seconds."""
    seconds: list[float] = []
    calls: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place,
        Interpreter(workers=workers) as interpreter,
    ):

        def player(vault: Vault, turns: int, counted: bool) -> None:
            functions = tools(vault)
            for turn in range(turns):
                begun = time.perf_counter()
                ran = interpreter.run(TURNS[turn % len(TURNS)], functions)
                if ran.error:
                    raise RuntimeError(ran.error)
                if counted:
                    seconds.append(time.perf_counter() - begun)
                    calls.append(ran.calls)

        vaults = [_vault(kind, Path(place) / str(n), files(chosen.notes)) for n in range(chosen.players)]
        _together([partial(player, vault, 8, False) for vault in vaults])
        begun, processor = time.perf_counter(), _processor_seconds()
        _together([partial(player, vault, chosen.turns, True) for vault in vaults])
        whole, processor = time.perf_counter() - begun, _processor_seconds() - processor
        for vault in vaults:
            vault.close()
    if len(seconds) != chosen.players * chosen.turns:
        raise RuntimeError(f"{len(seconds)} turns of {chosen.players * chosen.turns} were played")
    return {"seconds": whole, "turns": sorted(seconds), "calls": sum(calls), "processor": processor}


def _vault(kind: str, root: Path, notes: dict[str, str]) -> Vault:
    if kind == "memory":
        return Vault(MemoryStorage(notes))
    for path, text in notes.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Vault(DiskStorage(root, sync=kind == "disk, synced"))


def _together(jobs: list[Any]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _processor_seconds() -> float:
    """Processor time of this process and of all that it started and that still run."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [this, *this.children(recursive=True)])


def main() -> None:
    """Run the sides in turn and print the table."""
    chosen = options()
    kinds = named_sides(chosen.sides, SIDES)
    sides = {(kind, workers): partial(play, kind, workers, chosen) for kind in kinds for workers in chosen.workers}
    found = in_turn({f"{kind}, {workers} workers": side for (kind, workers), side in sides.items()}, chosen.rounds)
    rows = []
    for (kind, workers), outcomes in zip(sides, found.values(), strict=True):
        turns = len(outcomes[0]["turns"])
        rows.append(
            {
                "vault": kind,
                "workers": workers,
                "turns/s": middle([turns / o["seconds"] for o in outcomes]),
                "calls/s": middle([o["calls"] / o["seconds"] for o in outcomes]),
                "calls/turn": outcomes[0]["calls"] / turns,
                "median ms": middle([1e3 * o["turns"][turns // 2] for o in outcomes]),
                "99% ms": middle([1e3 * o["turns"][turns * 99 // 100] for o in outcomes]),
                "processor ms/turn": middle([1e3 * o["processor"] / turns for o in outcomes]),
            }
        )
    notes = [
        f"{chosen.players} players of {chosen.turns} turns each, vaults of {chosen.notes + 2} notes, medians of {chosen.rounds} rounds in turn",
        "median, 99%: of the time of a turn as its player sees it, waiting for a free worker included",
        "processor: of the trusted process, the workers and their interpreters together; synced: writes wait for the disk",
    ]
    show("Turns of the memory agent", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
