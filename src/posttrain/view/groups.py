"""The page of a group: its episodes side by side, with the values of each token and what made the difference."""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posttrain.errors import InputError
from posttrain.runs.directory import RunDirectory
from posttrain.view.browse import Filter, Store, at_step, group_of, steps_of
from posttrain.view.episodes import (
    TINTS,
    Look,
    Tint,
    episode_page,
    parting_of,
    prompt_text,
    scale_of,
    token_decoder,
    unit_credit_recipe,
)


def group_page(run: RunDirectory, given: Mapping[str, str], store: Store) -> dict[str, Any]:
    """The values of the template for the step, split and group in `given`."""
    wanted = Filter.of(given)
    group = wanted.group or 0
    steps, split = steps_of(run.episodes, wanted.split)
    if not steps:
        raise InputError(f"{run.path} has no stored episodes of this kind; go back to the run")
    step = at_step(steps, steps[-1].step if wanted.step is None else wanted.step)
    samples = group_of(step, group)
    if not samples:
        raise InputError(f"step {step.step} has no group {group}; go back to the episodes of the run")
    usual: Tint = "advantage" if any(sample.advantages for sample in samples) else "log-probability"
    in_units = any(sample.units is not None for sample in samples)
    tints = [one for one in TINTS if in_units or one != "unit credit"]
    tint: Tint = next((one for one in tints if one == given.get("tint")), usual)
    decode, credited = token_decoder(run), unit_credit_recipe(run)
    parting = parting_of(samples, decode)
    scale = scale_of(samples, tint)
    pages = []
    for number, sample in enumerate(samples):
        part = (parting.turn, parting.token) if parting and number in (parting.best, parting.worst) else None
        pages.append((sample.episode, episode_page(sample, Look(scale, tint, True, part), decode, credited, run.path)))
    # What all episodes begin with, the prompt, is shown once.
    columns = zip(*(page.messages for _, page in pages), strict=False)
    alike = itertools.takewhile(lambda row: row[0].turn is None and all(one == row[0] for one in row), columns)
    asked = [row[0] for row in alike] if len(pages) > 1 else []
    pages = [(episode, replace(page, messages=page.messages[len(asked) :])) for episode, page in pages]
    returns = [sample.episode.total_reward for sample in samples]
    groups = [entry.group for entry in store.entries(step)]
    return {
        "step": step,
        "split": split,
        "group": group,
        "before": max((one for one in groups if one < group), default=None),
        "after": min((one for one in groups if one > group), default=None),
        "asked": asked,
        "mean": statistics.fmean(returns),
        "spread": statistics.pstdev(returns),
        "pages": pages,
        "prompt": prompt_text(samples[0].episode, decode),
        "parting": parting,
        "tint": tint,
        "tints": tints,
        "scale": scale,
        "chosen": given.get("episode", ""),
    }
