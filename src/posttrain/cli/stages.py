"""The commands that run stages, pipelines and studies, and the options that they share."""

import difflib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.planning.memory import ModelSizes
    from posttrain.recipe.pipeline import PipelineRecipe
    from posttrain.recipe.plan import Device
    from posttrain.recipe.stages import Recipe


WORDS = "[RECIPE ...] [key=value ...]"
WORDS_HELP = (
    "Recipe files, or names of `posttrain recipe list` such as `rlhf/ppo`, merged left to right, then overrides of any of their keys: `key=value`, `--key value` or "
    "`--key=value`, with the key dotted as in `rollout.groups_per_step=4`. `posttrain recipe` lists the keys."
)
Words = Annotated[list[str] | None, Argument(metavar=WORDS, help=WORDS_HELP)]
_DRY_RUN = (
    "Show batch arithmetic and an estimate of memory. Load rows, tasks, reward functions and the tokenizer, and report the "
    "errors that the run would report, without training."
)
DryRun = Annotated[bool, Option("--dry-run", help=_DRY_RUN)]
_ON = "With --dry-run: plan for this GPU, h200, h100 or a100, or its memory in GB such as 48."
On = Annotated[str | None, Option(metavar="DEVICE", help=_ON)]
Full = Annotated[bool, Option("--full", help="With --dry-run: show the whole recipe, and the parts of memory.")]
Resume = Annotated[Path | None, Option(metavar="RUN", help="Resume the run in this directory.")]
_FALL_BACK = "With --resume: set damaged checkpoints aside and continue from the newest intact one."
FallBack = Annotated[bool, Option("--fall-back", help=_FALL_BACK)]
Overwrite = Annotated[bool, Option("--overwrite", help="Delete an existing run of the same name first.")]
_STRICT = "Exit with code 4 if training did not improve the held-out measure beyond chance."
Strict = Annotated[bool, Option("--strict", help=_STRICT)]
OPEN = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Context settings of commands that accept `--key value` for every recipe key."""


def run(
    stage: str,
    words: list[str],
    dry_run: bool,
    full: bool,
    on: str | None,
    resume: Path | None,
    overwrite: bool,
    strict: bool = False,
    **more: Any,
) -> None:
    """Run one stage of the recipe in `words`, show its plan, or continue the run `resume`."""
    from posttrain.recipe.sources import read_overrides
    from posttrain.verbs import read_recipe
    from posttrain.verbs import run as run_stage

    device = planned_device(dry_run, on, full)
    sources, overrides = split_words(words)
    given: list[Any] = [*sources, *read_overrides(overrides)]
    if not dry_run:
        if strict:
            _require_verdict(read_recipe(stage, *given, resume=resume))
        result = run_stage(stage, *given, resume=resume, overwrite=overwrite, **more)
        if strict:
            result.require_learning()
        return
    from posttrain.planning.model_sizes import model_sizes
    from posttrain.runs.tables import show_line
    from posttrain.terminal import new_console

    recipe = read_recipe(stage, *given, resume=resume)
    if os.environ.get("RANK", "0") != "0":  # torchrun starts the command once per process
        return
    console, sizes = new_console(), None if recipe.remote is not None else model_sizes(recipe.model.path)
    recipe = show_stage(recipe, sizes, console, device, full, chosen=resume is not None)
    for path in recipe.outputs if resume is None and not overwrite else ():
        if path.exists():
            how = "to start, pass --overwrite or another name, or continue it with --resume"
            show_line(console, f"note: {path} exists; {how}")
    show_checks(recipe, console)
    if not full:
        console.print("\nadd --full for the whole recipe and the parts of the estimate", highlight=False)
    if strict:
        _require_verdict(recipe)
    check_machine(recipe, sizes, device)


def show_stage(
    recipe: "Recipe",
    sizes: "ModelSizes | None",
    console: "Console",
    device: "Device | None",
    full: bool,
    chosen: bool = False,
) -> "Recipe":
    """Print the plan of a stage. Returns its recipe with the engine that it would use, unless that is `chosen`."""
    from posttrain.planning.dry_run import show_plan

    recipe = recipe if chosen else with_planned_engine(recipe, device, console)
    show_plan(recipe, sizes, console, device, full)
    return recipe


def with_planned_engine(recipe: "Recipe", device: "Device | None", console: "Console") -> "Recipe":
    """The recipe with the engine that the run would use on this machine. With `--on`, prints that the plan counts the
    local engine if the engine depends on what is installed there."""
    from posttrain.errors import InputError
    from posttrain.runs.tables import show_line
    from posttrain.training.stage import with_engine

    if not recipe.chooses_engine or recipe.remote is not None:
        return recipe
    chosen: Recipe = recipe
    with suppress(InputError):  # `model.device: cuda` without a GPU, in a plan for another machine
        chosen = with_engine(recipe, console)
    hardware = getattr(chosen, "hardware", None)
    if chosen is not recipe and hardware is not None and hardware.ray is None:
        # The run starts a server for each of its processes, and this process is alone.
        engine = chosen.sampler.model_copy(update={"servers": hardware.learners})
        return chosen.model_copy(update={"engine": engine})
    if chosen is recipe and device is not None and "engine" not in recipe.model_fields_set:
        line = "engine.type is local in this plan; with vLLM installed, a run on a GPU uses vLLM, which engine.type=vllm plans"
        show_line(console, line)
    return chosen


def show_checks(recipe: "Recipe", console: "Console", made: Sequence[Path] = ()) -> None:
    """Print the dtype and threads that this machine selects, load everything that the run would load before its
    model, and print the results. Arguments and errors as for `check_recipe`."""
    from posttrain.errors import InputError
    from posttrain.models.files import on_disk
    from posttrain.runs.tables import show_line
    from posttrain.training.checks import check_recipe
    from posttrain.training.stage import precision_notes, with_measured

    with suppress(InputError):  # the checks report it
        recipe = with_measured(recipe, console) if on_disk(recipe.model.path) else recipe
    for note in precision_notes(recipe):
        show_line(console, f"precision: {note}")
    console.print("\n[bold]checks[/bold]")
    for line in check_recipe(recipe, made) or ["nothing to load but the model"]:
        show_line(console, line, 2)


def check_machine(recipe: "Recipe", sizes: "ModelSizes | None", device: "Device | None") -> None:
    """InputError for packages that a run on this machine lacks, and DoesNotFit if it would be on its processors and needs
    more memory than they have. Prints a warning if it may need more."""
    import torch

    from posttrain.planning.inputs import require_extras
    from posttrain.planning.memory import require_memory
    from posttrain.runs.machine import memory_of_processors

    if device is None:
        require_extras(recipe)
    on_gpu = device is not None or (torch.cuda.is_available() and recipe.model.device != "cpu")
    memory = memory_of_processors()
    if sizes is not None and memory is not None and recipe.remote is None and not on_gpu:
        for line in require_memory(recipe, sizes, memory):
            typer.echo(line)


def planned_device(dry_run: bool, on: str | None, full: bool = False) -> "Device | None":
    """The GPU that `--on` names. Raises InputError for options that have no effect without `--dry-run`."""
    from posttrain.errors import InputError
    from posttrain.recipe.plan import device_of

    for option, given in (("--on", on is not None), ("--full", full)):
        if given and not dry_run:
            raise InputError(f"{option} has an effect only with --dry-run; add --dry-run, or remove {option}")
    return None if on is None else device_of(on)


_OPTIONS = ("--dry-run", "--full", "--on", "--resume", "--fall-back", "--overwrite", "--strict", "--debug", "--trust")


def split_words(words: list[str], *options: str) -> tuple[list[str], list[str]]:
    """Recipe files and overrides, each in order. A word is a file unless it begins with `--` or contains `=`.

    `--recipe NAME` and `--recipe=NAME` also name a file. `options`: those of the command besides the
    shared ones. Raises InputError for a misspelt option.
    """
    from posttrain.errors import InputError

    sources, overrides = [], []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if word.startswith("--") and (near := difflib.get_close_matches(name, [*_OPTIONS, *options], 1, 0.8)):
            hint = "" if near[0] == name else f"; the nearest is {near[0]}"
            raise InputError(f"there is no option {name} here{hint}")
        following = (
            [value]
            if equals or not word.startswith("--")
            else [one for one in [next(remaining, None)] if one is not None]
        )
        if name == "--recipe":
            sources += following
        elif word.startswith("--"):
            overrides += [word] if equals else [word, *following]
        elif equals and not os.path.isfile(word):
            overrides.append(word)
        else:
            sources.append(word)
    return sources, overrides


def one_file(command: str, words: list[str], what: str, example: str, *options: str) -> tuple[str, list[str]]:
    """The file of a `command` that takes one, a pipeline or a study, and overrides. `options`: as for `split_words`."""
    from posttrain.errors import InputError

    sources, overrides = split_words(words, *options)
    if not sources:
        raise InputError(f"{words[0]} is not a {what}; name a {what} file first, for example {example}")
    if len(sources) > 1:
        raise InputError(f"posttrain {command} takes one file; remove {', '.join(sources[1:])}")
    return sources[0], overrides


def stage_command(stage: str, description: str) -> Callable[..., None]:
    """The command that runs `stage`, with the options that all stages share."""

    def command(
        words: Words = None,
        dry_run: DryRun = False,
        full: Full = False,
        on: On = None,
        resume: Resume = None,
        fall_back: FallBack = False,
        overwrite: Overwrite = False,
        strict: Strict = False,
    ) -> None:
        run(stage, words or [], dry_run, full, on, resume, overwrite, strict, fall_back=fall_back)

    command.__name__, command.__doc__ = stage, description
    return command


sft = stage_command(
    "sft",
    """Train a policy on conversations, or on the traces of an environment's expert.

    Examples:
    posttrain sft data.train=conversations.jsonl data.held_out=100 name=first
    posttrain sft environment.type=sokoban name=warm
    posttrain sft --resume runs/warm
    """,
)


dpo = stage_command(
    "dpo",
    """Optimize a policy on preferences: dpo, ipo, cdpo, simpo, orpo, apo_zero, apo_down, bco on pairs, kto on judged answers.

    Examples:
    posttrain dpo data.train=pairs_train.jsonl data.validation=pairs_val.jsonl model.path=runs/sft/model name=dpo
    posttrain dpo data.train=pairs_train.jsonl loss.type=simpo loss.beta=2.5 data.held_out=100
    """,
)


reward = stage_command(
    "reward",
    """Train a reward model on pairs of answers.

    Examples:
    posttrain reward data.train=pairs_train.jsonl data.validation=pairs_val.jsonl name=rm
    posttrain reward recipes/helpsteer3/reward.yaml model.path=packaged:smollm2-135m --dry-run
    """,
)


rl = stage_command(
    "rl",
    """Train a policy by reinforcement learning in an environment.

    Examples:
    posttrain rl environment.type=bandit
    posttrain rl recipes/ragen/sokoban.yaml model.path=packaged:smollm2-135m --steps 20
    posttrain rl environment.type=frozen_lake --dry-run --on h200
    posttrain rl --resume runs/run
    """,
)


distill = stage_command(
    "distill",
    """Train a policy towards a teacher on the policy's own episodes (on-policy distillation).

    Examples:
    posttrain distill environment.type=bandit teacher.path=runs/rl/model
    posttrain distill recipes/distill/frozen_lake.yaml teacher.urls=[http://localhost:8000/v1] --dry-run
    posttrain distill --resume runs/run
    """,
)


def generate(
    words: Words = None,
    dry_run: DryRun = False,
    full: Full = False,
    on: On = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
) -> None:
    """Answer the rows of a data set and write a file of predictions. Resume a killed run with --resume RUN.

    Examples:
    posttrain generate data.test=test.jsonl model.path=runs/run/model out=predictions.jsonl
    posttrain generate data.test=test.jsonl samples=4 sampling.temperature=0.7
    posttrain generate data.test=test.jsonl engine.type=openai engine.url=http://localhost:8000/v1 engine.model=NAME
    """
    run("generate", words or [], dry_run, full, on, resume, overwrite)


PlanOnly = Annotated[bool, Option("--dry-run", help="Show which stages would run, and their plans. Run nothing.")]
_FILE_HELP = "A pipeline file, or a name from `posttrain recipe list`."
_WORDS_HELP = (
    "The pipeline's file, then overrides: `name=value`, `runs=value`, `data=FOLDER` for the stage that converts data, "
    "`common.KEY=value` for all other stages, `stages.NAME.KEY=value` for one stage."
)
_STRICT_STAGE = "Stop with code 4 after a stage that did not improve its held-out measure."


def pipeline(
    file: Annotated[str, Argument(metavar="PIPELINE", help=_FILE_HELP)],
    words: Annotated[list[str] | None, Argument(metavar="[key=value ...]", help=_WORDS_HELP)] = None,
    only: Annotated[str | None, Option(metavar="STAGE", help="Run only this stage.")] = None,
    start_from: Annotated[str | None, Option("--from", metavar="STAGE", help="Run this and all later stages.")] = None,
    dry_run: PlanOnly = False,
    full: Full = False,
    on: On = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Run finished stages again.")] = False,
    strict: Annotated[bool, Option("--strict", help=_STRICT_STAGE)] = False,
) -> None:
    """Run stages in order, each from the files or the model of an earlier one. Finished, unchanged stages are skipped.

    Examples:
    posttrain pipeline demo/pipeline
    posttrain pipeline demo/pipeline --dry-run
    posttrain pipeline demo/pipeline --from rl stages.rl.steps=50 stages.rl.max_minutes=20
    """
    from posttrain.recipe.pipeline import load_pipeline

    device = planned_device(dry_run, on, full)
    file, overrides = one_file("pipeline", [file, *(words or [])], "pipeline", "demo/pipeline", "--only", "--from")
    if dry_run:
        _plan_pipeline(load_pipeline(file, overrides), only, start_from, overwrite, device, full, strict)
        return
    from posttrain.recipe.sources import read_overrides
    from posttrain.verbs import pipeline as run_pipeline

    run_pipeline(file, *read_overrides(overrides), only=only, start_from=start_from, overwrite=overwrite, strict=strict)


def demo(dry_run: PlanOnly = False) -> None:
    """Train a small model to cross a frozen lake, in 4 to 8 minutes on two cores: `posttrain pipeline demo/pipeline`.

    Its runs are in `runs/demo`.

    Example:
    posttrain demo
    """
    pipeline("demo/pipeline", dry_run=dry_run)


def _require_verdict(recipe: Any) -> None:
    from posttrain.training.checks import require_verdict  # imports torch

    require_verdict(recipe)


def _plan_pipeline(
    loaded: "PipelineRecipe",
    only: str | None,
    start_from: str | None,
    overwrite: bool,
    device: "Device | None",
    full: bool,
    strict: bool,
) -> None:
    """Show the stages that would run and their plans, and check what they would load.

    Files of `convert` stages are written to a folder that is deleted afterwards, so that later stages are checked on them.
    """
    from pydantic import TypeAdapter

    from posttrain.data.convert import convert_files
    from posttrain.errors import DoesNotFit, InputError
    from posttrain.pipelines import chosen_stages, planned
    from posttrain.planning.model_sizes import model_sizes
    from posttrain.recipe.pipeline import ConvertRecipe
    from posttrain.recipe.stages import Recipe as AnyRecipe
    from posttrain.runs.tables import show_line
    from posttrain.terminal import new_console

    console, chosen = new_console(), chosen_stages(loaded, only, start_from)
    for line in planned(loaded, only, start_from, overwrite):
        show_line(console, line)
    start: dict[str, ModelSizes | None] = {}
    made: list[Path] = []
    converted: dict[str, str] = {}
    problems: list[str] = []
    failure: type[InputError] = DoesNotFit
    with TemporaryDirectory(prefix="posttrain-") as scratch:
        for stage in loaded.stages:
            folder, recipe = loaded.directory / stage.name, stage.recipe
            if stage in chosen:
                console.rule(f"stage {stage.name}")
            if isinstance(recipe, ConvertRecipe):
                exists = recipe.source is not None and Path(recipe.source).expanduser().exists()
                place = Path(scratch) / stage.name if exists else None
                if stage in chosen:
                    convert_files(recipe, place, lambda line: show_line(console, line), True)
                    converted |= {f"{folder}/": f"{place}/"} if exists else {}
                made.append(folder)
                continue
            # The exported model of a stage has the same sizes as its initial model.
            sizes = start[stage.name] = start[stage.upstream] if stage.upstream else model_sizes(recipe.model.path)
            if stage in chosen:
                recipe = show_stage(recipe, sizes, console, device, full)
                text = recipe.model_dump_json()
                for there, here in converted.items():
                    text = text.replace(there, here)
                checked = TypeAdapter(AnyRecipe).validate_json(text) if converted else recipe
                try:
                    if strict and checked.trains:
                        _require_verdict(checked)
                    show_checks(checked, console, made)
                    check_machine(recipe, sizes, device)
                except InputError as error:
                    failure = failure if isinstance(error, DoesNotFit) else InputError
                    message = str(error)
                    for there, here in converted.items():
                        message = message.replace(here, there)
                    problems += [f"stage {stage.name}: {sentence}" for sentence in message.splitlines()]
            made.append(folder)
    if problems:
        raise failure("\n".join(problems))


_GAIN = (
    "The gain or loss to show: points of success, or a difference of the mean return in its own unit. Default: 5 points, or a "
    "tenth of the return's standard deviation."
)
_PILOTS = "Finished runs of the recipe with different seeds, separated by commas."


def plan(
    words: Words = None,
    detect: Annotated[float | None, Option(metavar="GAIN", help=_GAIN)] = None,
    pilots: Annotated[str | None, Option(metavar="RUNS", help=_PILOTS)] = None,
    price: Annotated[float | None, Option(help="Price of an hour of the machine.", min=0)] = None,
) -> None:
    """Show how many training seeds and final tasks it takes to show that a recipe is better than another.

    The spread between seeds and tasks is that of stored runs in this environment, or of `--pilots`.

    Examples:
    posttrain plan board/firm_lake --detect 5
    posttrain plan rl.yaml --detect 3 --pilots runs/a,runs/b --price 2.5
    """
    from posttrain.evaluation.power import pilot_spread, plan_lines, stored_spread
    from posttrain.planning.dry_run import tasks_of
    from posttrain.recipe.pipeline import load_pipeline
    from posttrain.recipe.rollout import evaluated_environment
    from posttrain.recipe.sources import read_file, read_overrides
    from posttrain.runs.tables import show_line
    from posttrain.terminal import new_console
    from posttrain.verbs import read_recipe

    sources, overrides = split_words(words or [], "--detect", "--pilots", "--price")
    stage = read_file(sources[0]).values.get("stage", "rl") if sources else "rl"
    stages: list[Any]
    if stage == "pipeline":
        stages = [one.recipe for one in load_pipeline(sources[0], overrides).stages]
    else:
        stages = [read_recipe(stage, *sources, *read_overrides(overrides))]
    recipe = stages.pop()
    runs = [] if pilots is None else [Path(one) for one in pilots.split(",") if one]
    spread = stored_spread(recipe) if pilots is None else pilot_spread(runs, recipe, stages)
    tasks = None if evaluated_environment(recipe) is None else tasks_of(recipe)
    lines, table = plan_lines(recipe, spread, spread.gain_of(detect, recipe), tasks, price)
    console = new_console(highlight=False)
    for line in lines:
        show_line(console, line)
    console.print(table)
    show_line(console, table.note)


_UNIT_RUN = "Run of `posttrain reward` with `units`, for example runs/rm."
_UNIT_PAIRS = "File of pairs to fit on. Default: the run's validation pairs."


def fit_normalizer(
    run: Annotated[Path, Argument(metavar="RUN", help=_UNIT_RUN)],
    data: Annotated[str | None, Option(metavar="PATH", help=_UNIT_PAIRS)] = None,
) -> None:
    """Fit the normalizer of unit rewards by position in the answer. Writes RUN/normalizer/params.json.

    Examples:
    posttrain fit-normalizer runs/rm
    posttrain fit-normalizer runs/rm --data pairs_val.jsonl
    """
    from posttrain.plugins import require_module
    from posttrain.runs.directory import RunDirectory

    require_module("matplotlib", "posttrain fit-normalizer")
    directory = RunDirectory.open(run)
    from posttrain.training.reward import fit_run  # imports torch

    for line in fit_run(directory, data):
        typer.echo(line)


_STUDY_WORDS = (
    "Overrides of the study: `trials=30`, `workers=2`, `search.KEY.high=1e-4`, or `keys.KEY=value` for a recipe key of all "
    "trials."
)


_GROUP_HELP = (
    "Run only this group of a study with `groups`: its number, counted from 1, or its name. The best values of earlier groups "
    "apply if the study has run them."
)


def tune(
    file: Annotated[str, Argument(metavar="STUDY", help="A study file, or a name from `posttrain recipe list`.")],
    words: Annotated[list[str] | None, Argument(metavar="[key=value ...]", help=_STUDY_WORDS)] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the trials and run nothing.")] = False,
    resume: Annotated[bool, Option("--resume", help="Resume the existing study.")] = False,
    group: Annotated[str | None, Option(metavar="GROUP", help=_GROUP_HELP)] = None,
) -> None:
    """Search for values of recipe keys. Every trial is a run, scored by a held-out metric.

    Examples:
    posttrain tune rlhf/tune_sft --dry-run
    posttrain tune rlhf/tune_sft trials=8 keys.model.path=packaged:smollm2-135m
    posttrain tune rlhf/tune_sft --resume workers=2
    posttrain tune ragen/search --group 2
    """
    from posttrain.plugins import require_module
    from posttrain.recipe.study import load_study
    from posttrain.terminal import new_console

    file, overrides = one_file("tune", [file, *(words or [])], "study", "rlhf/tune_sft", "--group")
    study, console = load_study(file, overrides), new_console()
    require_module("optuna", "posttrain tune")
    from posttrain.tune.run import run_study, show_study

    if dry_run:
        show_study(study, console, group)
    else:
        run_study(study, resume, console, group)


KEYED = (sft, reward, dpo, rl, distill, generate, pipeline, plan, tune)
"""The commands that accept keys of a recipe, in the order of the help text."""
