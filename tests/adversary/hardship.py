"""Commands that are killed, or run out of space, at a drawn change of a file; the same command afterwards gives the same bits.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import contextlib
import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.adversary import hosts

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WRITES = ("open", "os.rename", "os.mkdir", "os.link", "os.truncate", "os.remove", "os.rmdir")
"""Audit events of Python that change a file; `open` does if its flags say so."""
_TINY = ["data.test=rows.jsonl", "model.path=run/model", "rollout.tokens_per_turn=6", "model.threads=1"]
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "hf": (["export", "run", "--out", "out"], ["out"]),
    "sharded": (["export", "run", "--shard-gigabytes", "0.0001", "--out", "out"], ["out"]),
    "gguf": (["export", "run", "--to", "gguf", "--out", "out"], ["out"]),
    "jsonl": (["data", "convert", "pairs", "rows.jsonl", "--out", "out.jsonl"], ["out.jsonl"]),
    "parquet": (["data", "convert", "pairs", "rows.jsonl", "--out", "out.parquet"], ["out.parquet"]),
    "generate": (["generate", "out=out.jsonl", "data.max_rows=5", "name=g", *_TINY], ["out.jsonl"]),
    "evaluate": (["evaluate", "recipe.yaml"], ["runs/e/results.json"]),
    "tune": (["tune", "study.yaml"], ["runs/s/best.yaml"]),
    "pipeline": (
        ["pipeline", "pipeline.yaml"],
        ["runs/p/rows/pairs.jsonl", "runs/p/warm/model", "runs/p/prefer/model"],
    ),
}
"""Name -> the words of a command, and the files or folders that it makes whole or not at all."""


def run(
    words: list[str], place: Path, at: tuple[Any, ...] = (), prepare: Callable[[], None] | None = None
) -> tuple[int, str]:
    """Run the command line in a process in the folder `place`; returns its exit code, negative for a signal, and its output.

    `at`: number of a change of files below `place`, and what happens there: signals, the second at the next change, or
    an errno that this change and each later one raises. `prepare` is called first in the process.
    """
    log = place.with_name(f"{place.name}.log")
    log.write_bytes(b"")
    return hosts.forked(_child, words, place, log, at, prepare), log.read_text(errors="replace")


def _child(words: list[str], place: Path, log: Path, at: tuple[Any, ...], prepare: Callable[[], None] | None) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(place)
    caches = dict.fromkeys(("POSTTRAIN_CACHE", "XDG_CACHE_HOME"), str(place.with_name("cache")))
    os.environ |= {"POSTTRAIN_PLOTS": "0", "CUDA_VISIBLE_DEVICES": "", **caches}
    if prepare is not None:
        prepare()
    from posttrain.cli.main import main

    changes = _watch(str(place), at)
    exit_code = main(words)
    place.with_name("changes").write_text(str(changes()))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _watch(folder: str, at: tuple[Any, ...]) -> Callable[[], int]:
    """Do what `at` says; the result counts the changes of files below `folder` so far."""
    count = 0

    def audit(event: str, words: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _WRITES or not isinstance(words[0], str | os.PathLike):
            return
        if event == "open" and not (isinstance(words[2], int) and words[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if not os.path.abspath(words[0]).startswith(folder):
            return
        count += 1
        if not at or count < at[0]:
            return
        if isinstance(at[1], signal.Signals):
            if count - at[0] < len(at) - 1:
                os.kill(os.getpid(), at[1 + count - at[0]])
        elif event not in ("os.remove", "os.rmdir"):
            raise OSError(at[1], os.strerror(at[1]), str(words[0]))

    sys.addaudithook(audit)
    return lambda: count


def _prepare_folder(place: Path) -> None:
    """A run that has ended, rows, a recipe of an evaluation, and a pipeline."""
    from tests.training.preferences import pair_rows, recipe_values, write_jsonl

    place.mkdir()
    shutil.copytree(hosts.undisturbed("dpo"), place / "run")
    rows = write_jsonl(place / "rows.jsonl", pair_rows(20))
    values = {"stage": "evaluate", "name": "e", "model": {"path": "run/model", "threads": 1}}
    shutil.copy(Path(hosts.__file__).parents[1] / "training" / "letters.py", place)
    values |= {"environment": {"type": "letters.py", "max_turns": 2}}
    values["rollout"] = {"tokens_per_turn": 6, "tokens_per_episode": 700}
    values["evaluation"] = {"final_seeds": {"start": 0, "count": 4}}
    (place / "recipe.yaml").write_text(json.dumps(values))
    (place / "more").mkdir()
    common = recipe_values("dpo", hosts.tiny_model(), place / "more", epochs=1)
    keys = ("rows_per_update", "optimizer", "learner", "evaluation", "checkpoint", "epochs")
    common = {key: common[key] for key in keys}
    stages: list[dict[str, Any]] = [
        {"name": "rows", "stage": "convert", "source": rows, "files": {"pairs": {"converter": "pairs"}}},
        {"name": "warm", "stage": "reward", "model": {"path": str(hosts.tiny_model()), "threads": 1}},
        {"name": "prefer", "stage": "dpo", "model": {"path": str(hosts.tiny_model()), "threads": 1}},
    ]
    for stage in stages[1:]:
        stage |= common | {"data": {"train": "stage:rows/pairs", "held_out": 4, "max_tokens": 200}}
    trial = {"stage": "rl", "model": {"path": str(hosts.tiny_model()), "threads": 1}, "steps": 2}
    trial |= {"environment": values["environment"], "checkpoint": {"every": 1}, "seeds": {"start": 0, "count": 8}}
    trial["rollout"] = {"groups_per_step": 2, "episodes_per_group": 2, "tokens_per_turn": 3, "tokens_per_episode": 200}
    held_out = {"seeds": {"start": 1000, "count": 2}, "final_seeds": {"start": 2000, "count": 2}}
    trial["evaluation"] = {"every": 1} | held_out
    study = {"stage": "tune", "name": "s", "keys": trial, "trials": 3, "sampler": {"seed": 1, "startup_trials": 2}}
    study["search"] = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}
    study["objective"] = {"metric": "return", "direction": "maximize"}
    (place / "study.yaml").write_text(json.dumps(study))
    (place / "pipeline.yaml").write_text(json.dumps({"stage": "pipeline", "name": "p", "stages": stages}))


def _digests(place: Path, outputs: list[str]) -> dict[str, str | None]:
    """The content of the outputs, without times; None for one that does not exist."""
    found: dict[str, str | None] = {}
    for name in outputs:
        path = place / name
        if not path.exists():
            found[name] = None
            continue
        digest = hashlib.sha256()
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(str(file.relative_to(place)).encode())
                digest.update(re.sub(rb'"(time|speed|memory)/[^,}]*', b"", file.read_bytes()))
        found[name] = digest.hexdigest()
    return found


@cache
def _undisturbed(command: str) -> tuple[dict[str, str | None], int]:
    """The outputs of the command without failures, and its number of changes of files."""
    folder = Path(tempfile.mkdtemp(dir=hosts._home().name))
    words, outputs = COMMANDS[command]
    _prepare_folder(folder / "place")
    code, said = run(words, folder / "place")
    assert code == 0, said[-2_000:]
    if command == "tune":
        TRIALS[:] = _trials(folder / "place")
    return _digests(folder / "place", outputs), int((folder / "changes").read_text())


TRIALS: list[Any] = []
"""The trials of a study without failures."""


def _trials(place: Path) -> list[Any]:
    from tests.tune import studies

    return studies.summary(place)


def _again(command: str, place: Path, after: str) -> None:
    """The same command, with `--resume` or `--overwrite` if it says so, makes what an undisturbed one makes."""
    words, outputs = COMMANDS[command]
    about = f"{command} after {after}"
    for _ in range(2):
        code, said = run(words, place)
        if code == 0:
            break
        assert code == 2, f"{about}: {said[-600:]}"
        option = re.search(r"`?(--resume) (\S+?)`|`(--overwrite|--resume)`", said)
        assert option is not None, f"{about}: {said[-600:]}"
        words = [words[0], "--resume", option[2]] if option[1] else [*words, option[3]]
    assert code == 0, f"{about}: {said[-600:]}"
    assert _digests(place, outputs) == _undisturbed(command)[0], f"{about}: other results"
    assert command != "tune" or _trials(place) == TRIALS, f"{about}: {_trials(place)}, not {TRIALS}"
    left = [str(path.relative_to(place)) for path in place.rglob("*") if "partial" in path.name]
    assert not left, f"{about}: {left} are left"


def killed(seed: int, folder: Path) -> None:
    """A command that is stopped up to three times leaves outputs whole or not at all, and the same command makes them."""
    draw = random.Random(seed)
    command = draw.choice(list(COMMANDS))
    words, outputs = COMMANDS[command]
    whole, changes = _undisturbed(command)
    place = folder / "place"
    _prepare_folder(place)
    history = []
    for _ in range(draw.randrange(1, 4)):
        signals = [draw.choice(SIGNALS) for _ in range(draw.choice([1, 1, 2]))]
        at = (draw.randrange(1, changes + 1), *signals)
        code, said = run(words, place, at)
        history.append((at[0], [number.name for number in signals], code))
        assert re.search("Traceback|with --debug", said) is None, f"{command} {history}: {said[-600:]}"
        assert code in (0, 2, 130, *(-number for number in SIGNALS)), f"{command} {history}: {said[-600:]}"
        for name, content in _digests(place, outputs).items():
            assert content in (None, whole[name]), f"{command} {history}: {name} is half written"
        if code == 0:  # it was done before the signal came
            assert _digests(place, outputs) == whole, f"{command} {history}: other results"
            return
    _again(command, place, str(history))


def no_space(seed: int, folder: Path) -> None:
    """From a change of a file on, the disk is full, over quota or read-only: one sentence, and later the same results."""
    draw = random.Random(seed)
    command = draw.choice(list(COMMANDS))
    words, outputs = COMMANDS[command]
    whole, changes = _undisturbed(command)
    place = folder / "place"
    _prepare_folder(place)
    errors = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES]
    at = (draw.randrange(1, changes + 1), draw.choice(errors))
    code, said = run(words, place, at)
    what = f"{command} {at[0]} {errno.errorcode[at[1]]}: {said[-600:]}"
    assert code in (0, 1, 2), what
    assert re.search("Traceback|with --debug", said) is None, what
    assert code == 0 or len(re.findall("^posttrain: ", said, re.MULTILINE)) == 1, what
    for name, content in _digests(place, outputs).items():
        assert content in (None, whole[name]), f"{name} is half written: {what}"
        assert code != 0 or content is not None, f"{name} is missing: {what}"
    _again(command, place, what)


def bombs(seed: int, folder: Path) -> None:
    """Files of a few kilobytes that stand for gigabytes, or are broken: bounded time and memory, and counted problems."""
    draw = random.Random(seed)
    kind = draw.choice(["parquet", "parquet", "jsonl.gz", "gguf"])
    file = folder / f"bomb.{kind}"
    _write_bomb(draw, kind, file)
    data = bytearray(file.read_bytes()[: 1 << 22])
    for _ in range(draw.choice([0, 0, 1, 4])):
        data[draw.randrange(len(data))] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
    with file.open("r+b") as opened:
        opened.write(data)
    code = hosts.forked(_read_bomb, file, folder / "said")
    said = (folder / "said").read_text() if (folder / "said").exists() else ""
    assert code == 0, f"{kind}: exit code {code} {said}"


def _read_bomb(file: Path, said: Path) -> None:
    """Read the file with at most 2 GiB of memory and 60 s of a processor."""
    import pyarrow.parquet  # noqa: F401

    from posttrain.data.files import read_rows
    from posttrain.errors import InputError
    from posttrain.models.load import converted_gguf
    from posttrain.recipe.data import SourceRecipe

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    os.environ["POSTTRAIN_CACHE"] = str(file.parent / "cache")
    try:
        if file.suffix == ".gguf":
            converted_gguf(file)
        else:
            for _, row in read_rows(SourceRecipe(path=str(file))):
                assert isinstance(row, dict) or "\n" not in row, row
    except BaseException as error:
        if not isinstance(error, InputError) or "MemoryError" in str(error):
            said.write_text(f"{type(error).__name__}: {error}"[:300])
            os._exit(1)
    os._exit(0)


def _write_bomb(draw: random.Random, kind: str, file: Path) -> None:
    import gzip
    import struct

    import pyarrow as arrow
    from pyarrow import parquet

    if kind == "jsonl.gz":
        long = b'{"prompt": "' + b"x" * 70_000 + b'"}\n'
        line = draw.choice([b"{}\n", b"\n", b" " * 4096, long, b"[" * 5_000 + b"\n"])
        with gzip.open(file, "wb", compresslevel=1) as out:
            for _ in range(draw.choice([20, 1_500])):
                out.write(line * (50_000 // len(line) + 1))
        return
    if kind == "gguf":
        number = [0, 1, 2, 3, 1 << 20, 1 << 23, 1 << 31, 1 << 40, 1 << 60, (1 << 64) - 1]
        content = b"GGUF" + struct.pack("<IQQ", draw.choice([2, 3, 3, 99]), draw.choice(number), draw.choice(number))
        content += struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"
        for name in draw.sample([b"tokenizer.ggml.tokens", b"llama.block_count", b"tokenizer.ggml.model", b"x"], 3):
            content += struct.pack("<Q", draw.choice([len(name), len(name), draw.choice(number)])) + name
            kinds = [draw.randrange(14) for _ in range(draw.choice([1, 1, 1, 99]))]
            content += struct.pack("<I", draw.choice([9, 9, kinds[0]]))
            content += b"".join(struct.pack("<IQ", one, draw.choice(number)) for one in kinds)
        content += struct.pack("<Q", 5) + b"t.wei" + struct.pack("<I", draw.choice([1, 2, 1 << 31]))
        shape = [draw.choice(number) for _ in range(2)]
        content += struct.pack("<QQIQ", *shape, draw.randrange(40), draw.choice(number))
        file.write_bytes(content)
        os.truncate(file, draw.choice([len(content), 1 << 33]))
        return
    count = draw.choice([1, 300, 5_000])
    texts = arrow.array(["x" * draw.choice([0, 100, 1 << 20, 4 << 20]), "y"])
    indices = arrow.array([draw.choice([0, 0, 0, 1, None])] * count, arrow.int32())
    column: Any = arrow.DictionaryArray.from_arrays(indices, texts)
    offsets = arrow.array(range(count + 1), arrow.int32())
    for _ in range(draw.choice([0, 1, 2, 40])):
        wrap = draw.randrange(3)
        if wrap == 0:
            column = arrow.StructArray.from_arrays([column], ["content"])
        elif wrap == 1:
            column = arrow.ListArray.from_arrays(offsets, column)
        else:
            column = arrow.MapArray.from_arrays(offsets, arrow.array(["k"] * count), column)
    nulls = arrow.array([[None] * draw.choice([0, 10, 4_000_000])] + [[]] * (count - 1), arrow.list_(arrow.int8()))
    names = draw.choice([["prompt"], ["prompt", "messages"], ["prompt", *(f"c{n}" for n in range(99))]])
    columns = dict.fromkeys(names, nulls) | {"prompt": column}
    group = draw.choice([1_000, count])
    codec = draw.choice(["zstd", "gzip", "snappy", "none"])
    parquet.write_table(arrow.table(columns), file, compression=codec, row_group_size=group)


def places(seed: int, folder: Path) -> None:
    """A command with an odd folder, home, temporary folder, locale, clock, umask or standard input: the same results."""
    draw = random.Random(seed)
    command = draw.choice(list(COMMANDS))
    words, outputs = COMMANDS[command]
    whole, _ = _undisturbed(command)
    place = folder / draw.choice(["place", "a b", "ü\u0131İ ß", "a\nb", "{x} %s $HOME", "-out", "a'b\"c", "x" * 200])
    _prepare_folder(place)
    odd = draw.sample(["home", "temporary", "full", "locale", "clock", "stdin", "umask", "stray"], draw.randrange(1, 4))
    code, said = run(words, place, (), partial(_odd_place, odd, seed, str(folder)))
    what = f"{command} in {place.name!r} with {odd}: exit code {code}: {said[-600:]}"
    assert re.search("Traceback|with --debug", said) is None, what
    if code != 0:  # nothing but a full folder for temporary files may stop it, with a sentence
        assert "full" in odd or "temporary" in odd, what
        assert len(re.findall("^posttrain: ", said, re.MULTILINE)) == 1, what
        return
    assert _digests(place, outputs) == whole, f"other results: {what}"
    made = [place / name for name in outputs if "umask" in odd]
    files = [file for path in made for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    # A hard link to the model of another run has the permissions of that.
    assert all(not file.stat().st_mode & 0o077 or file.stat().st_nlink > 1 for file in files), what


def _odd_place(odd: list[str], seed: int, folder: str) -> None:
    """Make the surroundings of this process odd."""
    import locale

    from tests.training.small import jumping_clock

    draw = random.Random(seed)
    file = Path(folder) / "file"
    file.write_text("x")
    for name, variable in (("home", "HOME"), ("temporary", "TMPDIR")):
        if name in odd:
            value = draw.choice([None, "", "/nonexistent/a", str(file), "relative", "/proc", "~", "\udcff"])
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
            if name == "home":
                for other in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
                    os.environ.pop(other, None)
            tempfile.tempdir = None
    if "full" in odd:
        full = Path(folder) / "tmp"
        full.mkdir()
        os.environ["TMPDIR"], tempfile.tempdir = str(full), None

        def refuse(event: str, words: tuple[Any, ...]) -> None:
            writes = event in ("os.mkdir", "os.rename") or (
                event == "open" and isinstance(words[2], int) and words[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if writes and isinstance(words[0], str | os.PathLike) and str(words[0]).startswith(str(full)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(words[0]))

        sys.addaudithook(refuse)
    if "locale" in odd:
        os.environ |= dict.fromkeys(("LANG", "LC_ALL"), draw.choice(["C", "tr_TR.UTF-8", "POSIX", "xx_YY", "de_DE"]))
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, "")
    if "clock" in odd:
        jumping_clock(draw)
    if "stdin" in odd:
        os.close(0)
        sys.stdin = None
    if "umask" in odd:
        os.umask(0o077)
    if "stray" in odd:
        os.environ |= {"PYTHONPATH": "/nonexistent", "COLUMNS": draw.choice(["0", "1", "-5", "x"]), "TERM": "dumb"}
        os.environ |= {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(file)}
