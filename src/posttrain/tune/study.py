"""A study on disk: its directory, its file, its Optuna storage, and what a kill has left of it."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from posttrain.errors import InputError, PosttrainError
from posttrain.recipe.sources import dump_values
from posttrain.recipe.study_file import Study
from posttrain.runs.files import storage_errors, write_atomically
from posttrain.tune.sampler import NumberedSampler
from posttrain.tune.space import stored

_MAY_CHANGE = ("trials", "workers", "devices", "weights", "retest", "runs", "name", "storage")
"""What of a study may be otherwise when it goes on."""


def open_study(study: Study, resume: bool) -> optuna.Study:
    """The Optuna study of `study`, new or gone on with; call it while `only_here` holds.

    `InputError` where its name is used, its search has changed since, or the storage cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file, name = study.directory / "study.yaml", study.recipe.name
    if not resume and file.is_file():
        raise InputError(f"the study {study.directory} exists; go on with `--resume`, or choose another `name`")
    if not resume and any(not path.name.startswith(".lock-") for path in study.directory.iterdir()):
        raise InputError(f"{study.directory} exists and is no study, so it is left alone; choose another `name`")
    url = study.recipe.storage or f"sqlite:///{study.directory / 'study.db'}"
    try:
        joins = resume and study.recipe.storage is not None and name in optuna.get_all_study_names(url)
        if resume and not file.is_file() and not joins:
            raise InputError(f"there is no study in {study.directory}; leave out --resume to begin one")
        if not resume and study.recipe.storage and name in optuna.get_all_study_names(url):
            raise InputError(f"storage {url} has a study {name}; go on with `--resume`, or choose another `name`")
        if not file.is_file() and not joins:
            write_atomically(file, _snapshot_text(study))
        kept = optuna.create_study(
            storage=url,
            study_name=name,
            direction=study.recipe.objective.direction,
            sampler=NumberedSampler(study.recipe.sampler),
            pruner=_pruner(study),
            load_if_exists=True,
        )
    except PosttrainError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise InputError(f"storage {url} cannot be opened ({type(error).__name__}: {said}); correct its URL") from error
    _require_same(study, kept)
    write_atomically(file, _snapshot_text(study))
    for number, point in enumerate(study.recipe.start):
        kept.enqueue_trial(stored(point), user_attrs={"start": number}, skip_if_exists=True)
    return kept


@contextmanager
def only_here(study: Study) -> Iterator[None]:
    """Hold the study for this process, among those of this machine; `InputError` where another runs it.

    Other machines may work on the same storage at the same time, also in the same directory.
    """
    with storage_errors(study.directory):
        study.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(study.directory / f".lock-{socket.gethostname()}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process runs the study {study.directory}; wait for it, or stop it") from None
        yield
    finally:
        os.close(descriptor)


def owner(study: Study) -> str:
    """Who runs a trial: this machine, for this directory."""
    return f"{socket.gethostname()}:{study.directory.resolve()}"


def torn_trials(study: Study, kept: optuna.Study) -> list[FrozenTrial]:
    """Trials that a process of this study left running when it was killed, in order. Call it while `only_here` holds."""
    running = kept.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    if study.recipe.storage is None:
        return running
    return [trial for trial in running if _torn(trial, owner(study))]


def _torn(trial: FrozenTrial, us: str) -> bool:
    if "owner" in trial.user_attrs:
        return bool(trial.user_attrs["owner"] == us)
    # Killed between two writes; another machine needs less than a minute from the one to the other.
    return trial.datetime_start is not None and datetime.now() - trial.datetime_start > timedelta(minutes=1)


def _pruner(study: Study) -> optuna.pruners.BasePruner:
    pruner = study.recipe.pruner
    if pruner.type == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=pruner.startup_trials, n_warmup_steps=pruner.warmup_steps)
    if pruner.type == "hyperband":
        most = pruner.max_steps or "auto"
        return optuna.pruners.HyperbandPruner(pruner.min_steps, most, pruner.reduction)
    return optuna.pruners.NopPruner()


def _snapshot(study: Study) -> dict[str, Any]:
    return {**study.recipe.model_dump(mode="json"), "base": study.base.values}


def _snapshot_text(study: Study) -> str:
    header = "# The study as it runs, with every default and the recipe that it searches (`base`). Go on with\n"
    return f"{header}# posttrain tune THE_STUDY.yaml --resume\n{dump_values(_snapshot(study))}"


def _require_same(study: Study, kept: optuna.Study) -> None:
    """`InputError` where the search is another than the storage's; a new one is stored."""
    now = json.loads(json.dumps(_snapshot(study)))
    before = kept.user_attrs.get("study")
    if before is None:
        kept.set_user_attr("study", now)
        return
    changed = [key for key in now if key not in _MAY_CHANGE and before.get(key) != now[key]]
    changed = ["the recipe" if key == "base" else key for key in changed if key not in ("recipe", "keys")]
    if changed:
        raise InputError(
            f"{' and '.join(changed)} of the study {study.directory} has changed since it began, so that old and new trials "
            "do not compare; begin another with another `name`, or take the change back"
        )
