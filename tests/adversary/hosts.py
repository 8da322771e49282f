"""Failures of the machine of a run: kills, missing permissions, clocks that jump, file systems that ignore case.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from posttrain.errors import PosttrainError

STAGES = ("rl", "dpo", "reward", "sft", "distill")


@cache
def _home() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process for tiny models and undisturbed runs, which cases share."""
    return tempfile.TemporaryDirectory(prefix="posttrain-adversary-")


@cache
def tiny_model(seed: int = 0) -> Path:
    """A tiny random model."""
    from tests.conftest import save_tiny_model

    return save_tiny_model(Path(_home().name) / f"tiny-{seed}", seed=seed)


def tiny_run(stage: str, runs: Path) -> dict[str, Any]:
    """The recipe of a run of few steps."""
    from tests.training import preferences, small

    runs.mkdir(exist_ok=True)
    if stage in ("rl", "distill"):
        values = small.recipe_values(tiny_model(), runs, steps=3)
        if stage == "rl":
            return values
        for key in ("kl", "entropy"):
            del values[key]
        del values["rollout"]["filter"]
        return values | {"stage": "distill", "teacher": {"path": str(tiny_model(5))}}
    return preferences.recipe_values(stage, tiny_model(), runs, epochs=1)


@cache
def undisturbed(stage: str) -> Path:
    """A run without failures."""
    from tests.training import small

    runs = Path(_home().name) / stage
    assert small.run(tiny_run(stage, runs)) == 0, (runs / "log.txt").read_text()[-2_000:]
    return runs / "small"


def kill(seed: int, folder: Path) -> None:
    """A run that is killed up to three times, at any moment, resumes to the same bits; its clock jumps in a part of them."""
    from tests.training import small

    draw = random.Random(seed)
    stage = draw.choice(STAGES)
    whole = undisturbed(stage)
    values = tiny_run(stage, folder / "runs")
    run = folder / "runs" / "small"
    log = folder / "runs" / "log.txt"
    said = []
    for _ in range(draw.randrange(1, 4)):
        if draw.random() < 0.6:
            died = small.run(values, resume=run.exists(), die_at=("files", draw.randrange(1, 150)))
        else:
            died = small.run(values, resume=run.exists(), kill_after=draw.uniform(0, 6))
        said.append(died)
        assert died in (0, -9), f"{stage} {said}: {log.read_text()[-500:]}"
    jumps = ("clock", seed) if draw.random() < 0.3 else None
    assert small.run(values, resume=run.exists(), die_at=jumps) == 0, f"{stage} {said}: {log.read_text()[-500:]}"
    assert small.weights(run) == small.weights(whole), f"{stage} {said}: other weights"
    assert small.metrics(run) == small.metrics(whole), f"{stage} {said}: other metrics"
    if stage in ("rl", "distill"):
        assert small.episodes(run) == small.episodes(whole), f"{stage} {said}: other episodes"
    names = [str(path.relative_to(run)) for path in run.rglob("*")]
    assert len({name.casefold() for name in names}) == len(names), "files that differ only in case"
    assert not [name for name in names if "partial" in name], "partial files are left"


def permission(seed: int, folder: Path) -> None:
    """An ordinary user without permission for a file or folder: each command ends with a sentence, or works without it."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="posttrain-user-") as name:
        place = Path(name)
        paths = _materials(place)
        command = draw.choice(_commands(place))
        denied = draw.sample(paths, draw.randrange(1, 4))
        for path in denied:
            os.chmod(path, draw.choice([0o555, 0o111, 0o000]) if path.is_dir() else draw.choice([0o444, 0o000]))
        code = forked(_as_ordinary_user, command, place)
        said = (place / "said.txt").read_text(errors="replace")
        lacks = ", ".join(str(path.relative_to(place)) for path in denied)
        what = f"{' '.join(command)} without {lacks}: {said[-400:]}"
        assert code in (0, 1, 2), what
        assert re.search("Traceback|with --debug", said) is None, what
        assert code == 0 or "posttrain: " in said or "Error" in said, what


def _materials(place: Path) -> list[Path]:
    """Make a run, rows, a recipe, a vault and an output folder; returns the paths whose permissions can be removed."""
    from tests.training.preferences import pair_rows, write_jsonl

    shutil.copytree(undisturbed("dpo"), place / "run")
    (place / "out").mkdir()
    (place / "cache").mkdir()
    vault = place / "vault"
    vault.mkdir()
    (vault / "user.md").write_text("# Me\n")
    write_jsonl(place / "rows.jsonl", pair_rows(9))
    values = tiny_run("dpo", place / "start")
    values |= {"runs": str(place / "out"), "name": "run"}
    values["data"] = {"train": str(place / "rows.jsonl"), "cache": str(place / "cache"), "max_tokens": 200}
    (place / "recipe.yaml").write_text(json.dumps(values | {"steps": 1, "evaluation": {"every": 0}}))
    (place / "said.txt").touch()
    names = ("out", "cache", "vault", "vault/user.md", "rows.jsonl", "recipe.yaml", "run", "run/recipe.yaml")
    names += ("run/metrics.jsonl", "run/environment.json", "run/results.json", "run/checkpoints", "run/model")
    return [place / name for name in names]


def _commands(place: Path) -> list[list[str]]:
    run, out, vault = str(place / "run"), place / "out", str(place / "vault")
    return [
        ["dpo", str(place / "recipe.yaml")],
        ["dpo", "--resume", run],
        ["dpo", str(place / "recipe.yaml"), "--dry-run"],
        ["report", run],
        ["report", run, "--out", str(out / "page.html")],
        ["plot", run],
        ["episodes", run],
        ["compare", run, run, "--out", str(out / "compared.json"), "--out", str(out / "table.md")],
        ["data", "inspect", str(place / "rows.jsonl"), f"model.path={tiny_model()}"],
        ["memory", "journal", vault],
        ["memory", "undo", vault],
    ]


def _drop_capabilities() -> None:
    """Drop root's capability to ignore permissions: from now on, the permissions of files apply.

    Another user, as by `setuid`, may not be able to read the interpreter of the tests.
    """
    import ctypes

    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if os.getuid() == 0 and ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _as_ordinary_user(command: list[str], place: Path) -> None:
    """Run the command line without the rights of root, with its output in `said.txt`."""
    said = os.open(place / "said.txt", os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir("/")
    _drop_capabilities()
    os.environ |= {"HOME": str(place / "cache"), "POSTTRAIN_CACHE": str(place / "cache"), "POSTTRAIN_PLOTS": "0"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MPLCONFIGDIR": str(place / "cache")}
    from posttrain.cli.main import main

    os._exit(main(command))


def clock(seed: int, folder: Path) -> None:
    """The clock jumps by up to ten years at any call: requests keep their time-out, logs and journals their order."""
    from tests.training.small import jumping_clock

    real = time.time
    jumping_clock(random.Random(seed))
    started = time.monotonic()
    try:
        _under_a_jumping_clock(random.Random(seed), folder)
    finally:
        time.time = real
    assert time.monotonic() - started < 15, "a wait until the clock shows a time"


def _under_a_jumping_clock(draw: random.Random, folder: Path) -> None:
    from posttrain.engines.openai import ChatRequestError
    from posttrain.runs.directory import RunDirectory
    from posttrain.runs.metrics import MetricsLog, read_metrics
    from posttrain_memory.vault.limits import VaultLimits
    from posttrain_memory.vault.storage import DiskStorage
    from posttrain_memory.vault.vault import Vault
    from tests.engines import test_openai_client as client

    run = RunDirectory(folder / "run")
    run.logs.mkdir(parents=True)
    with MetricsLog(run, draw.choice([[], ["tensorboard"]])) as log:
        for step in range(1, 4):
            log.write(step, "train", {"values": 1.0})
        log.truncate_after(1)
        log.write(2, "train", {"values": 2.0})
    assert [line["step"] for line in read_metrics(run.metrics)] == [1, 2]
    assert all(line.get("time/run", 0) >= 0 for line in read_metrics(run.metrics)), "negative times"
    root = folder / "vault"
    root.mkdir()
    with contextlib.closing(Vault(DiskStorage(root, sync=False), VaultLimits())) as vault:
        for number in range(4):
            vault.create(f"n{number}.md", "x")
        assert [entry.number for entry in vault.journal.entries()] == [1, 2, 3, 4]
        vault.journal.undo(2)
        assert vault.tree().count(".md") == 1
    if draw.random() < 0.5:

        def drips(send: Callable[[bytes], None]) -> None:
            for _ in range(30):
                send(b"H")
                time.sleep(0.1)

        with client.server(drips) as port, contextlib.suppress(ChatRequestError):
            client.ask(port, seconds=1.0)


class FoldingOs:
    """The module `os` as on a file system that ignores case: a name also finds the entry with other case."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def _listed(name: str, folder: int) -> str:
        from posttrain_memory.vault.paths import case_key

        if name == ".":
            return name
        # A descriptor of its own: a copy would move the position of a listing that the storage is at.
        listing = os.open(".", os.O_RDONLY, dir_fd=folder)
        entries = os.listdir(listing)
        os.close(listing)
        return next((entry for entry in entries if case_key(entry) == case_key(name)), name)

    def open(self, name: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return os.open(name if dir_fd is None else self._listed(str(name), dir_fd), flags, mode, dir_fd=dir_fd)

    def mkdir(self, name: str, mode: int, *, dir_fd: int) -> None:
        os.mkdir(self._listed(name, dir_fd), mode, dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        os.unlink(self._listed(name, dir_fd), dir_fd=dir_fd)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        os.rmdir(self._listed(name, dir_fd), dir_fd=dir_fd)

    def replace(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.replace(old, self._listed(new, dst_dir_fd), src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


def letter_case(seed: int, folder: Path) -> None:
    """Notes whose names differ only in case: a vault is the same on a file system that ignores case."""
    from posttrain_memory.vault import storage
    from posttrain_memory.vault.limits import VaultError
    from posttrain_memory.vault.vault import Vault

    draw = random.Random(seed)
    (folder / "notes").mkdir()
    names = ["a.md", "A.md", "b/c.md", "B/c.md", "b/C.md", "b.md", "STRASSE.md", "straße.md", "é.md", "É.md", "ﬁ.md"]
    names += ["fi.md"]
    with mock.patch.object(storage, "os", FoldingOs()):
        vaults = [Vault(storage.MemoryStorage()), Vault(storage.DiskStorage(folder / "notes", sync=False))]
        done = []
        for _ in range(draw.randrange(4, 30)):
            call = draw.choice(["create", "append", "delete", "move", "undo"])
            words = {"delete": 1, "move": 2, "undo": 0}.get(call, 1)
            arguments = [draw.choice(names) for _ in range(words)] + (["x"] if call in ("create", "append") else [])
            done.append(f"{call} {' '.join(arguments)}")
            outcomes = []
            for vault in vaults:
                try:
                    getattr(vault.journal if call == "undo" else vault, call)(*arguments)
                    outcomes.append("done")
                except (VaultError, PosttrainError) as error:
                    outcomes.append(str(error))
            notes = [{path: vault.read(path) for path in vault._storage.sizes()} for vault in vaults]
            assert (notes[0], outcomes[0]) == (notes[1], outcomes[1]), f"{done}: {outcomes}, {notes}"
        vaults[1].close()


def about(text: str = "x") -> str:
    """The file `environment.json` of a run, with `text` for every text."""
    keys = ("id", "recipe_hash", "started", "command", "python", "platform", "processor")
    return json.dumps({"posttrain_run": 1, **dict.fromkeys(keys, text), "cpus_allowed": 2, "git": None, "packages": {}})


def spliced(draw: random.Random, text: str, pieces: list[str], times: int, most: int) -> str:
    """`text` with pieces in `times` places, each for fewer than `most` characters."""
    for _ in range(times):
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(pieces) + text[place + draw.randrange(most) :]
    return text


def mutated(draw: random.Random, value: Any, odd: Sequence[Any]) -> Any:
    """A JSON value of which some parts are replaced by odd ones, and some keys are missing."""
    if draw.random() < 0.09:
        return draw.choice(odd)
    if isinstance(value, dict):
        return {key: mutated(draw, item, odd) for key, item in value.items() if draw.random() > 0.05}
    return [mutated(draw, item, odd) for item in value] if isinstance(value, list) else value


def forked(target: Callable[..., None], *arguments: Any) -> int:
    """The exit code of a process that calls `target`, negative for a signal."""
    from tests.training.small import PRELOAD

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.adversary.hardship"])
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def quietly(command: list[str]) -> tuple[int, str, str]:
    """Run the command line here; returns its exit code, output and errors."""
    from posttrain.cli.main import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        exit_code = main(command)
    return exit_code, out.getvalue(), errors.getvalue()
