"""`--dry-run`: print the full recipe, batch arithmetic, and an estimate of memory, without running anything."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TypeGuard

from rich.console import Console
from rich.table import Table

from posttrain.data.held_out import TaskSplit
from posttrain.environments.protocol import task_split
from posttrain.errors import InputError
from posttrain.planning.devices import Device
from posttrain.planning.memory import (
    ModelSizes,
    at_a_time,
    dedicated_memory,
    engine_memory,
    memory_estimate,
    process_memory,
    with_dtypes,
)
from posttrain.planning.workers import PlacedRecipe, placement_of
from posttrain.recipe.compose import dump_recipe
from posttrain.recipe.engines import LocalEngineRecipe, VllmEngineRecipe
from posttrain.recipe.model import LoraRecipe
from posttrain.recipe.rollout import evaluated_environment, shown_seeds, updates_behind
from posttrain.recipe.stages import (
    DistillRecipe,
    DpoRecipe,
    EvaluateRecipe,
    GenerateRecipe,
    Recipe,
    RewardRecipe,
    RlRecipe,
    SftRecipe,
)
from posttrain.recipe.units import (
    CompatibleCredit,
    HindsightCredit,
    LeaveOneOutCredit,
    PrefixCredit,
    TruncationCredit,
    UnitCreditRecipe,
)
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.tables import show_line

Learned = RlRecipe | DistillRecipe | SftRecipe | DpoRecipe | RewardRecipe
Played = RlRecipe | DistillRecipe | SftRecipe | EvaluateRecipe


def tasks_of(recipe: Played) -> TaskSplit:
    """The tasks of a stage with an environment; reads the files whose rows are tasks. InputError as when it runs."""
    environment = recipe.environment or evaluated_environment(recipe)
    assert environment is not None
    if isinstance(recipe, RlRecipe | DistillRecipe):
        return task_split(environment, recipe.evaluation, recipe.seeds)
    if isinstance(recipe, SftRecipe):
        return task_split(environment, recipe.evaluation, recipe.experts.seeds, "experts.seeds")
    return replace(task_split(environment, recipe.evaluation, None), validation=())


def show_plan(
    recipe: Recipe, sizes: ModelSizes | None, console: Console, device: Device | None = None, full: bool = True
) -> None:
    """Print the plan: model, batches and memory.

    Args:
        full: Print the whole recipe and the parts of memory as well.
        sizes: Sizes of the model. None: memory is unknown.
        device: The GPU of each process. None: unknown, or a CPU.
    """
    if full:
        console.print(f"[bold]recipe[/bold] ({recipe.stage})")
        console.print(dump_recipe(recipe), markup=False, highlight=False, soft_wrap=True, end="")
    else:
        console.print(f"[bold]{recipe.stage}[/bold] in {recipe.runs}/{recipe.name}", highlight=False)
        console.print("\n[bold]model[/bold]")
        show_line(console, _model(recipe, sizes), 2)
    tasks = None
    if isinstance(recipe, Played) and evaluated_environment(recipe) is not None:
        with suppress(InputError):  # `posttrain.training.checks` reports it.
            tasks = tasks_of(recipe)
    console.print("\n[bold]batches[/bold]")
    for line in batch_arithmetic(recipe, tasks):
        show_line(console, line, 2)
    if isinstance(recipe, Learned) and recipe.hardware.processes > 1:
        show_line(console, _processes(recipe), 2)
    console.print("\n[bold]memory[/bold]")
    if recipe.remote is not None:
        console.print("  none for the model: it runs on the server")
    elif sizes is None:
        unknown = (
            f"  the files of {recipe.model.path} are not on this machine and its sizes are not known by name, so its memory "
            "is unknown"
        )
        console.print(unknown, markup=False, highlight=False, soft_wrap=True)
    elif not full:
        _show_totals(recipe, sizes, device, console)
    else:
        console.print(_memory_table(with_dtypes(recipe, device), sizes, device))
    if sizes is not None and (dedicated := _dedicated(with_dtypes(recipe, device), sizes, device)):
        roles = ", ".join(f"{role} {_bytes(count)}" for role, count in dedicated.items())
        show_line(console, f"on each GPU of the other workers: {roles}", 2)
    for warning in [*_too_large(with_dtypes(recipe, device), sizes, device), *recipe_warnings(recipe)]:
        show_line(console, f"warning: {warning}")


def _model(recipe: Recipe, sizes: ModelSizes | None) -> str:
    if recipe.remote is not None:
        return f"{recipe.remote.model} at {recipe.remote.url}"  # type: ignore[attr-defined]
    size = "" if sizes is None else f", {sizes.parameters:,} parameters"
    dtype = recipe.model.dtype or "float32 on a CPU, bfloat16 on a GPU"
    return f"{recipe.model.path}{size}, {dtype}" + (", LoRA" if recipe.model.lora else "")


def _show_totals(recipe: Recipe, sizes: ModelSizes, device: Device | None, console: Console) -> None:
    """Print the sum of memory and its largest parts."""
    rows, _ = _at_peak(with_dtypes(recipe, device), sizes, device)
    largest = sorted(rows, key=lambda what: -rows[what])[:2]
    parts = ", ".join(f"{what} {_bytes(rows[what])}" for what in largest)
    total = _bytes(sum(rows.values()))
    each = " per process" if _is_divided(recipe) else ""
    show_line(console, f"about {total}{each}, the most for {parts}", 2)


def _processes(recipe: Learned) -> str:
    """How several processes divide the work."""
    count = recipe.hardware.processes
    play = f" and the {recipe.rollout.groups_per_step} groups" if isinstance(recipe, RlRecipe | DistillRecipe) else ""
    return (
        f"{count} processes divide the forward passes of each update{play}; each holds 1/{count} of the model's state"
    )


def batch_arithmetic(recipe: Recipe, tasks: TaskSplit | None = None) -> list[str]:
    """Batch arithmetic of the recipe, one line per part. Rows that are tasks are counted if `tasks` is given."""
    if isinstance(recipe, Played) and (environment := evaluated_environment(recipe)) is not None:
        rows = [one.rows_key for one in (recipe.environment, environment) if one is not None]
        tasks = tasks if any(rows) else tasks_of(recipe)
    if isinstance(recipe, RlRecipe):
        return [*_rl(recipe), _tasks(recipe, tasks), *_evaluation(recipe, tasks, recipe.steps)]
    if isinstance(recipe, DistillRecipe):
        return [*_distill(recipe), _tasks(recipe, tasks), *_evaluation(recipe, tasks, recipe.steps)]
    if isinstance(recipe, SftRecipe | DpoRecipe | RewardRecipe):
        return _rows(recipe, tasks)
    return _generation(recipe) if isinstance(recipe, GenerateRecipe) else _evaluation(recipe, tasks, 0)


def _generation(recipe: GenerateRecipe) -> list[str]:
    """Rows, sampling, engine and output of the `generate` stage."""
    paths, limits = ", ".join(source.path for source in recipe.data.test), recipe.rollout
    rows = f"the first {recipe.data.max_rows:,} usable rows" if recipe.data.max_rows else "every usable row"
    heat = recipe.sampling.temperature
    how = "greedy" if heat == 0 else f"at temperature {heat:g}"
    lines = [
        f"{rows} of {paths}, {recipe.samples} {_plural('answer', recipe.samples)} each, {how}",
        f"answers of at most {limits.tokens_per_turn:,} tokens, thinking {'kept' if recipe.thinking == 'keep' else 'removed'}",
    ]
    if (engine := recipe.remote) is not None:
        lines.append(
            f"{engine.model} at {engine.url}, {engine.max_concurrent} {_plural('request', engine.max_concurrent)} in flight"
        )
    else:
        assert isinstance(recipe.engine, LocalEngineRecipe | VllmEngineRecipe)
        lines.append(f"{recipe.engine.slots} answers in flight, {recipe.window} per window")
    return [*lines, f"predictions: {recipe.predictions}"]


def _rows(recipe: SftRecipe | DpoRecipe | RewardRecipe, tasks: TaskSplit | None) -> list[str]:
    learner, each = recipe.learner, recipe.rows_per_update
    what = {"sft": "rows", "reward": "pairs", "dpo": "pairs"}[recipe.stage]
    if recipe.data is None:
        assert isinstance(recipe, SftRecipe)
        seeds = tasks.training if tasks is not None else recipe.experts.seeds.of_generated("experts.seeds")
        held_out = recipe.experts.held_out
        count = (len(seeds) - held_out) * recipe.experts.per_seed
        updates = recipe.steps or recipe.epochs * math.ceil(count / each)
        lines = [
            f"{count} traces of the {recipe.experts.expert} policy, {recipe.epochs} "
            f"{_plural('epoch', recipe.epochs)}, {each} traces per update: {updates} updates",
            f"traces on {_named(tasks, 0)}" + (f", the last {held_out} for their loss alone" if held_out else ""),
        ]
    else:
        paths = ", ".join(source.path for source in recipe.data.train)
        end = (
            f"{recipe.steps} {_plural('update', recipe.steps)}"
            if recipe.steps
            else f"{recipe.epochs} {_plural('epoch', recipe.epochs)}"
        )
        lines = [f"{what} from {paths}, {each} per update, {end}", f"rows of at most {recipe.data.max_tokens} tokens"]
        held = recipe.data.held_out
        share = f"{100 * held:g}% of the" if isinstance(held, float) else str(held)
        for name in ("validation", "test"):
            paths = ", ".join(source.path for source in getattr(recipe.data, name))
            lines += [f"{name} on {paths}"] if paths else []
        use = "for validation" if recipe.data.test or held == 1 else "half for validation, half for the final table"
        lines += [f"{share} rows held out of the training rows, {use}"] if held else []
        updates = recipe.steps or 0
    lines.append(f"forward passes of at most {learner.tokens_per_batch} tokens, without padding")
    if isinstance(recipe, SftRecipe) and evaluated_environment(recipe) is not None:
        lines += _evaluation(recipe, tasks, updates)
    return lines


def _rl(recipe: RlRecipe) -> list[str]:
    updates = recipe.steps * recipe.learner.updates_per_step * recipe.learner.epochs_per_step
    return [
        *_episodes(recipe),
        *_ahead(recipe),
        *_additional(recipe, updates),
        *([] if recipe.unit_credit is None else [_units(recipe.unit_credit)]),
    ]


def _distill(recipe: DistillRecipe) -> list[str]:
    """Episodes and updates, the teacher, and steps on fixed rows."""
    teacher, off = recipe.teacher, recipe.off_policy
    who = teacher.path or f"the policy with its {teacher.policy} weights and the text of teacher.context"
    if teacher.urls:
        who = f"{teacher.model or 'the first model'} at {', '.join(teacher.urls)}, {teacher.max_concurrent} requests in flight"
    lines = [*_episodes(recipe), f"teacher: {who}"]
    if off is not None:
        paths = ", ".join(source.path for source in off.data.train)
        lines.append(
            f"each step trains on {off.rows_per_step} rows from {paths} with probability {off.share:g} in place of episodes: "
            f"about {recipe.steps * off.share:,.0f} of {recipe.steps:,} steps"
        )
    return lines


def _episodes(recipe: RlRecipe | DistillRecipe) -> list[str]:
    """Episodes, updates and forward passes of a step and of the run."""
    rollout, learner = recipe.rollout, recipe.learner
    groups, size = rollout.groups_per_step, rollout.episodes_per_group
    episodes, updates = groups * size, learner.updates_per_step * learner.epochs_per_step
    per_update = math.ceil(groups / learner.updates_per_step) * size
    passes = math.ceil(per_update / (learner.tokens_per_batch // rollout.tokens_per_episode))
    return [
        f"{groups} {_plural('group', groups)} x {size} {_plural('episode', size)} = {episodes} episodes per step",
        f"{learner.updates_per_step} {_plural('update', learner.updates_per_step)} per step x {learner.epochs_per_step} "
        f"{_plural('epoch', learner.epochs_per_step)} = {updates} optimizer {_plural('step', updates)} per step, "
        f"each on about {per_update} episodes",
        f"forward passes of at most {learner.tokens_per_batch} tokens; at most {passes} per optimizer step, with "
        f"episodes of {rollout.tokens_per_episode} tokens",
        f"{recipe.steps} {_plural('step', recipe.steps)}: {recipe.steps * episodes:,} episodes and {recipe.steps * updates:,} "
        f"optimizer {_plural('step', recipe.steps * updates)}",
    ]


def _tasks(recipe: RlRecipe | DistillRecipe, tasks: TaskSplit | None) -> str:
    taken, count = recipe.steps * recipe.rollout.groups_per_step, len(tasks.training) if tasks is not None else 0
    used = f"{taken:,} of them used"
    if 0 < count < taken:
        used = f"each used about {taken / count:.1f} times"
    return f"training on {_named(tasks, 0)}, {used}"


def _named(tasks: TaskSplit | None, part: int) -> str:
    """The tasks of a part: 0 for training, 1 for the learning curve, 2 for the final table."""
    kind = "" if part == 0 else "held-out "
    if tasks is None:
        return f"{kind}tasks, which are known when they are read"
    seeds = (tasks.training, *tasks.held_out)[part]
    source = tasks.held_out_source if part else tasks.source
    if source is None:
        return f"{'the ' * bool(kind)}{kind}seeds {shown_seeds(seeds)}"
    return f"{len(seeds):,} {kind}{_plural('task', len(seeds))} of {source}"


def _ahead(recipe: RlRecipe) -> list[str]:
    """Limits of asynchronous rollouts, and the rule for episodes in flight when new weights arrive."""
    rollout = recipe.rollout
    if not rollout.async_rollouts:
        return []
    behind = updates_behind(rollout, recipe.learner)
    rules = {
        "finish": "finish with the old weights",
        "continue": "continue with the new weights from the next token",
        "restart": "restart with the new weights",
    }
    lines = [
        f"episodes start at most {rollout.async_rollouts} {_plural('step', rollout.async_rollouts)} ahead of the learner, with weights at most "
        f"{behind} optimizer {_plural('step', behind)} old; when new weights arrive, episodes in flight {rules[rollout.on_new_weights]}"
    ]
    if rollout.max_staleness is not None:
        most = rollout.max_staleness
        lines.append(f"an episode with a token older than {most} optimizer {_plural('step', most)} is dropped")
    return lines


def _units(credit: UnitCreditRecipe) -> str:
    """Cost of unit credit in reward-model inputs, with K units per answer."""
    if isinstance(credit, PrefixCredit | TruncationCredit):
        asked = "1 pass of the reward model" if credit.probe == "one_pass" else "K texts for the reward model"
    elif isinstance(credit, LeaveOneOutCredit):
        asked = "K + 1 texts for the reward model"
    elif isinstance(credit, CompatibleCredit):
        asked = "K texts for the reward model"
    else:
        asked = "no text for the reward model"
    what = "advantages" if isinstance(credit, HindsightCredit) else "rewards"
    return f"{credit.type} {what} for K units per answer, weight {credit.beta:g}: {asked} more per episode"


def _additional(recipe: RlRecipe, updates: int) -> list[str]:
    """Work of the optimizer steps besides the policy: critic and rows."""
    lines = []
    if recipe.has_critic:
        alone = recipe.critic.updates_before_policy
        first = f"; the first {alone} without the policy, which makes {updates - alone:,}" if alone else ""
        who, how = (
            ("the critic", "on the same episodes, in separate forward and backward passes")
            if recipe.critic.backbone == "separate"
            else ("the value head", "in the forward and backward passes of the policy")
        )
        lines.append(f"{who} makes {updates:,} optimizer {_plural('step', updates)} {how}{first}")
    if recipe.ptx is not None:
        paths = ", ".join(source.path for source in recipe.ptx.data.train)
        rows, longest = recipe.ptx.rows_per_update, recipe.ptx.data.max_tokens
        more = math.ceil(rows / (recipe.learner.tokens_per_batch // longest))
        lines.append(
            f"each optimizer step of the policy also uses {rows} {_plural('row', rows)} from {paths}, at most {more} "
            f"additional forward {_plural('pass', more)} with rows of {longest} tokens"
        )
    return lines


def _evaluation(recipe: Played, tasks: TaskSplit | None, steps: int) -> list[str]:
    evaluation = recipe.evaluation

    def episodes(part: int) -> str:
        count = len(tasks.held_out[part - 1]) if tasks is not None else 0
        return f"{count * evaluation.episodes_per_seed or 'one or more'} episodes on {_named(tasks, part)}"

    how = "greedy" if evaluation.sampling.temperature == 0 else f"at temperature {evaluation.sampling.temperature:g}"
    if (environment := evaluation.environment) is not None:
        how += f", in {environment.type} with at most {environment.max_turns} {_plural('turn', environment.max_turns)}"
    if isinstance(recipe, EvaluateRecipe):
        return [f"evaluation, {how}: {episodes(2)}", *_remote(recipe, tasks)]
    final = f"final table, {how}: {episodes(2)}, "
    if evaluation.every == 0:
        return [f"{final}after training"]
    during = (steps - 1) // evaluation.every
    between = f"{during} {_plural('time', during)} during and after training"
    first = ("before, ", "before and ") if evaluation.start else ("", "")
    return [
        f"evaluation, {how}: {episodes(1)}, {first[0]}{between}",
        f"{final}{first[1]}after training",
    ]


def _remote(recipe: EvaluateRecipe, tasks: TaskSplit | None) -> list[str]:
    """Server and maximum number of requests and tokens of an evaluation with a remote model."""
    if (engine := recipe.remote) is None:
        return []
    evaluation, most = recipe.evaluation, recipe.rollout.tokens_per_turn
    count = len(tasks.test) if tasks is not None else 0
    episodes, turns = count * evaluation.episodes_per_seed, recipe.environment.max_turns
    # A follow-up turns each update into two conversations.
    turns *= 2 if getattr(recipe.environment, "follow_up", False) else 1
    return [
        f"{engine.model} at {engine.url}, {engine.max_concurrent} {_plural('episode', engine.max_concurrent)} in flight",
        f"at most {episodes * turns:,} requests ({turns} {_plural('turn', turns)} per episode) of at most {most:,} sampled "
        f"tokens: {episodes * turns * most:,} tokens",
    ]


def _is_divided(recipe: Recipe) -> TypeGuard[Learned]:
    return isinstance(recipe, Learned) and (recipe.hardware.processes > 1 or recipe.hardware.offload == "all")


def _memory_rows(recipe: Recipe, sizes: ModelSizes, device: Device | None) -> Mapping[str, tuple[int, str]]:
    if _is_divided(recipe):
        rows = process_memory(recipe, sizes, device)
    else:
        rows = memory_estimate(recipe, sizes, placement_of(recipe), device)
    dedicated = _dedicated(recipe, sizes, device)
    return {what: row for what, row in rows.items() if what not in dedicated}


def _dedicated(recipe: Recipe, sizes: ModelSizes, device: Device | None) -> dict[str, int]:
    """Role -> bytes on one GPU, of the workers whose GPUs are not those of the learners."""
    if not isinstance(recipe, PlacedRecipe) or recipe.hardware.ray is None:
        return {}
    return dedicated_memory(recipe, sizes, device)


def _at_peak(recipe: Recipe, sizes: ModelSizes, device: Device | None) -> tuple[Mapping[str, int], str]:
    """The items that are on the device at the same time when they need the most memory, and when that is. A CPU keeps the
    cache of the engine and the memory of activations.
    """
    rows = _memory_rows(recipe, sizes, device)
    placement = placement_of(recipe)
    engine = engine_memory(recipe, sizes, placement, device)
    if device is None or not engine:
        return {what: count for what, (count, _) in rows.items()}, ""
    learning, sampling = at_a_time(recipe, rows, engine, placement)
    if learning == sampling:
        return learning, ""
    both = ((learning, "while learning"), (sampling, "while sampling"))
    return max(both, key=lambda moment: sum(moment[0].values()))


def _too_large(recipe: Recipe, sizes: ModelSizes | None, device: Device | None) -> list[str]:
    """A sentence if the run needs more memory than the device has; otherwise empty."""
    if recipe.remote is not None or sizes is None or device is None:
        return []
    together = _together(recipe, sizes, device)
    if together <= device.memory:
        return []
    fitting = next(
        (keys for keys, changed in _smaller(recipe) if _together(changed, sizes, device) <= device.memory), None
    )
    remedy = (
        f"it fits with {fitting}" if fitting is not None else "no setting makes it fit; divide it (hardware.processes)"
    )
    return [
        f"the run needs an estimated {_bytes(together)} and {device.name} has {_bytes(int(device.memory))}; {remedy}"
    ]


def _together(recipe: Recipe, sizes: ModelSizes, device: Device) -> int:
    """Bytes on the GPU that needs the most."""
    return max(sum(_at_peak(recipe, sizes, device)[0].values()), *_dedicated(recipe, sizes, device).values(), 0)


def _smaller(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Changes to a recipe that save memory, with their keys, cheapest first."""
    if not isinstance(recipe, Learned):
        return
    checkpointed = recipe.model.model_copy(update={"gradient_checkpointing": True})
    adapters = recipe.model.lora or LoraRecipe()
    adapted = checkpointed.model_copy(update={"lora": adapters})
    sleeping = recipe.hardware.model_copy(update={"offload": "rollouts"})
    offloaded = recipe.hardware.model_copy(update={"offload": "optimizer"})
    everything = recipe.hardware.model_copy(update={"offload": "all"})
    eight = {"optimizer": recipe.optimizer.model_copy(update={"type": "adamw_8bit"})}
    shown = "model.gradient_checkpointing=true"
    yield shown, recipe.model_copy(update={"model": checkpointed})
    if recipe.hardware.processes == 1 and recipe.hardware.offload == "none":
        yield "optimizer.type=adamw_8bit", recipe.model_copy(update=eight)
        yield f"{shown} optimizer.type=adamw_8bit", recipe.model_copy(update={"model": checkpointed, **eight})
    keeps_state = recipe.hardware.offload == "none" and recipe.optimizer.type == "adamw"
    if isinstance(recipe, RlRecipe | DistillRecipe) and keeps_state and not recipe.rollout.async_rollouts:
        yield "hardware.offload=rollouts", recipe.model_copy(update={"hardware": sleeping})
    for name, hardware in (("optimizer", offloaded), ("all", everything)):
        yield (
            f"{shown} hardware.offload={name}",
            recipe.model_copy(update={"model": checkpointed, "hardware": hardware}),
        )
    yield f"{shown} model.lora.rank={adapters.rank}", recipe.model_copy(update={"model": adapted})


def _memory_table(recipe: Recipe, sizes: ModelSizes, device: Device | None) -> Table:
    apart, rows = _is_divided(recipe), _memory_rows(recipe, sizes, device)
    table = Table("what", "memory", "counted as", box=None, show_header=False)
    for what, (count, how) in rows.items():
        table.add_row(f"  {what}", _bytes(count), how)
    present, when = _at_peak(recipe, sizes, device)
    together, said = sum(present.values()), "an estimate"
    if device is not None and together > device.memory:
        said += f"; {device.name} has {_bytes(int(device.memory))}"
    said += f"; the most at one time, {when}" if when else ""
    each = "per process" if apart else "total"
    table.add_row(f"  [bold]{each}[/bold]", _bytes(together), said)
    table.columns[1].justify = "right"
    return table


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}es" if word.endswith("s") else f"{word}s"
