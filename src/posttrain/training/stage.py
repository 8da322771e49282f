"""Run one stage in this process, with the precision, threads and engine of this machine."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console

from posttrain.distributed.world import current_world, join_world
from posttrain.errors import InputError
from posttrain.images import keep_in
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.run import StageRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.storage import free_space, has_state
from posttrain.runs.tables import show_line
from posttrain.terminal import new_console

if TYPE_CHECKING:
    from posttrain.training.trainer import Callback

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def precision_notes(recipe: StageRecipe) -> list[str]:
    """One sentence for each model of `recipe` whose precision depends on this machine, with the selected dtype and the
    reason, and for each model whose bfloat16 is emulated. The first sentence is about `device: auto` if torch cannot
    use the GPU."""
    if recipe.remote is not None:
        return []
    notes = unused_gpu(recipe.model.device)
    dtypes = {key: section.dtype for key, section in recipe.models().items() if hasattr(section, "dtype")}
    open_ones = {name: dtype for name, dtype in dtypes.items() if dtype != "float32"}
    if not open_ones or (recipe.model.device == "cpu" and set(open_ones.values()) == {None}):
        return notes
    import torch

    from posttrain.models.layers import resolve_fused
    from posttrain.models.load import has_bfloat16, resolve_device

    if recipe.model.device == "cuda" and not torch.cuda.is_available():
        return notes  # A dry run for another machine. A real run stops when it loads the model.
    device = resolve_device(recipe.model.device)
    native = has_bfloat16(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
    if recipe.model.fused == "auto" and resolve_fused("auto", device) == "liger":
        notes.append("model.fused auto is liger: the package liger-kernel is installed")
    reason = f"{where} has {'' if native else 'no '}bfloat16 instructions"
    for name, dtype in open_ones.items():
        if dtype is None and device.type == "cpu":
            continue
        if dtype is None and native:
            notes.append(f"{name}.dtype is bfloat16 on {where}; set it to float32 for full precision")
        elif dtype in ("auto", None):
            notes.append(f"{name}.dtype {dtype or 'null'} is {'bfloat16' if native else 'float32'}: {reason}")
        elif not native:
            notes.append(f"{name}.dtype bfloat16 is emulated, slower than float32: {reason}")
    return notes


def unused_gpu(device: str) -> list[str]:
    """A sentence if `device` falls back to the CPU although this machine has an NVIDIA driver."""
    if device != "auto" or not NVIDIA_DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    import torch

    if torch.cuda.is_available():
        return []
    build = f"finds no GPU with CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    return [
        f"model.device auto is cpu although this machine has an NVIDIA driver: torch {torch.__version__} {build}; install "
        "torch for the CUDA version of the driver, or set model.device=cpu"
    ]


def finish_ended(recipe: StageRecipe, run: RunDirectory, console: Console) -> None:
    """Report that the run has ended. InputError if the recipe has more steps than the run was started with."""
    steps = getattr(recipe, "steps", None)
    if steps is not None and steps > run.saved_step() and steps != run.load_recipe().steps:  # type: ignore[attr-defined]
        raise InputError(
            f"{run.path} has ended at step {run.saved_step()} and its training state is deleted (checkpoint.keep_state), so "
            f"it cannot be continued; start a run from {run.path / 'model'} as `model.path`, or run it again with "
            "checkpoint.keep_state=always"
        )
    free_space(run)
    show_line(
        console,
        f"{run.path} has ended; its report is {run.report}; to train further, start a run with model.path={run.path / 'model'}, or train it with checkpoint.keep_state=always and resume it with steps=",
    )


def with_measured(recipe: StageRecipe, console: Console) -> StageRecipe:
    """The recipe with the fastest precision and number of threads of this processor where `dtype` is auto and
    `model.threads` null (`training.measured`). The first process measures for all, and prints what was chosen and why.

    Both are stored with the run (`with_begun`), because other choices change the last bits of results. Nothing is measured
    on a GPU, on a cluster, and with `hardware.deterministic`. A model that cannot be timed keeps `auto`, and a line says so.
    """
    return _with_models(recipe, current_world().on_rank0(lambda: _measured(recipe, console)))


def _measured(recipe: StageRecipe, console: Console) -> dict[str, dict[str, Any]]:
    """The keys that `with_measured` changes, by model."""
    hardware = getattr(recipe, "hardware", HardwareRecipe())
    learns, samples = hasattr(recipe, "optimizer"), getattr(recipe.sampler, "type", "") == "local"
    if recipe.remote is not None or hardware.ray is not None or hardware.deterministic or not (learns or samples):
        return {}
    from posttrain.models.load import resolve_device

    if resolve_device(recipe.model.device).type != "cpu":
        return {}
    import torch

    from posttrain.training.measured import UPDATE, busy_processors, choose, thread_counts

    model, busy, counts = recipe.model, 0.0, [recipe.model.threads or torch.get_num_threads()]
    if model.threads is None and current_world().size == 1 and "OMP_NUM_THREADS" not in os.environ:
        busy = busy_processors()
        counts = thread_counts(busy)
    changes: dict[str, dict[str, Any]] = {}
    for key, section in recipe.models().items():
        auto, compared = getattr(section, "dtype", None) == "auto", counts if key == "model" else counts[:1]
        if not auto and len(compared) == 1:
            continue
        timed = model if key == "model" else ModelRecipe(path=section.path or model.path, dtype="auto")
        try:
            found = choose(timed, compared, learns or key != "model", samples, keep=not busy)
        except InputError:
            continue  # loading the model reports it
        except Exception as error:  # of any code of a model
            kept = (
                f"{key}.dtype auto follows the processor's instructions" if auto else "model.threads is torch's number"
            )
            cause = (str(error).splitlines() or [""])[0]
            show_line(console, f"{kept}: the model cannot be timed here ({type(error).__name__}: {cause})")
            continue
        changes[key] = {"dtype": found["dtype"]} if auto else {}
        changes[key] |= {"threads": found["threads"]} if len(compared) > 1 else {}
        if auto or found["threads"] != compared[0]:
            chosen = ", ".join(f"{key}.{name} is {value}" for name, value in changes[key].items())
            times = ", ".join(f"{float(f'{seconds:.2g}'):g} s in {how}" for how, seconds in found["seconds"].items())
            times += ", bfloat16 far slower" if auto and "bfloat16" not in times else ""
            beside = f" beside {busy:.0f} busy threads of other processes" if busy else ""
            show_line(console, f"{chosen}: {UPDATE:,} tokens take {times}, measured here{beside}")
        if auto and found["dtype"] == "float32" and hasattr(section, "head_dtype"):
            changes[key]["head_dtype"] = "model"  # it has no effect in float32, which a stored recipe refuses
    return changes


def with_begun(recipe: StageRecipe, begun: StageRecipe) -> StageRecipe:
    """The recipe with the precision and threads that its run `begun` was started with, where `recipe` leaves them open."""
    changes = {}
    for key, stored in begun.models().items():
        section = recipe.models().get(key)
        names = ["dtype", "head_dtype"] if getattr(section, "dtype", None) == "auto" else []
        names += ["threads"] if getattr(section, "threads", 0) is None else []
        changes[key] = {name: getattr(stored, name) for name in names if hasattr(stored, name)}
    return _with_models(recipe, changes)


def _with_models(recipe: StageRecipe, changes: Mapping[str, Mapping[str, Any]]) -> StageRecipe:
    """`recipe` with `changes` of the keys of its models."""
    models = recipe.models()
    update = {key: models[key].model_copy(update=dict(keys)) for key, keys in changes.items() if keys}
    return recipe.model_copy(update=update) if update else recipe


def with_engine(recipe: StageRecipe, console: Console) -> StageRecipe:
    """The recipe with the engine of this machine's device, if it names none; prints which and why on a GPU.

    On a GPU that is vLLM, which fuses more of a decoding step than the local engine does.
    """
    if not recipe.chooses_engine:
        return recipe
    settings: list[str] = []
    if "engine" in recipe.model_fields_set:
        if (engine := recipe.sampler).type == "local":
            settings = [f"engine.{key}" for key, value in engine if value != getattr(type(engine)(), key)]
        if not settings:
            return recipe
    from posttrain.models.load import family_of, resolve_device

    if resolve_device(recipe.model.device).type != "cuda":
        return recipe
    world = current_world()
    chosen, reason = recipe, ""
    if settings:
        reason = f"the recipe sets {', '.join(settings)}; without that, vLLM is used where it is installed"
    elif find_spec("vllm") is None:
        reason = "vLLM is not installed here; install it, or set engine.type=vllm and engine.python to an interpreter with it"
    elif family_of(recipe.model) is not None:
        reason = "vLLM with images was run on processors only; set engine.type=vllm to try it here"
    elif world.size > world.local_size:
        reason = "vLLM servers of a run are on one machine; on several, set hardware.ray"
    elif (Path(recipe.model.path).expanduser() / "adapter_config.json").is_file():
        reason = f"{recipe.model.path} is an adapter, and vLLM needs a whole model"
    else:
        vllm = {"type": "vllm", "servers": world.size}
        try:
            chosen = type(recipe).model_validate(recipe.model_dump(exclude_unset=True) | {"engine": vllm})
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    kind = "local" if reason else "vllm"
    reason = reason or "vLLM is installed; set engine.type=local to sample in this process instead"
    if world.is_rank0:
        show_line(console, f"engine.type is {kind}: {reason}")
    return chosen


def with_memory(recipe: StageRecipe) -> StageRecipe:
    """The recipe with the `hardware.gradient_sync` of this machine's GPUs. InputError for a run that cannot fit on them."""
    if recipe.remote is not None:  # which needs no torch
        return recipe
    from posttrain.models.load import resolve_device
    from posttrain.planning.memory import fitted
    from posttrain.recipe.plan import Device

    device = resolve_device(recipe.model.device)
    if device.type != "cuda":
        return recipe
    import torch

    gpu = Device(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
    world = current_world()
    chosen = world.on_rank0(lambda: fitted(recipe, gpu))
    if (hardware := getattr(chosen, "hardware", None)) is not None:
        world.hardware = hardware
    return chosen


def run_in_process(
    recipe: StageRecipe,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    callbacks: Sequence["Callback"] = (),
) -> RunDirectory:
    """Run the stage in this process, which may be one of several of the run. Returns the run.

    Arguments and errors are those of `posttrain.stages.run_stage`.
    """
    console = console or new_console()
    hardware = getattr(recipe, "hardware", HardwareRecipe())

    def opened() -> RunDirectory:
        run = RunDirectory.open(f"{recipe.runs}/{recipe.name}") if resume else RunDirectory.create(recipe, overwrite)
        if not run.checkpoints.is_dir():
            raise InputError(
                f"{run.checkpoints} is missing, so the run cannot continue; restore it, or start the run again with "
                "--overwrite"
            )
        held.enter_context(run.lock())
        if not resume or has_state(run):  # an ended run has not failed if it cannot be continued
            held.enter_context(run.recording_failure())
        return run

    with join_world(hardware, recipe.model.device) as world, ExitStack() as held:
        if resume:
            begun = RunDirectory.open(f"{recipe.runs}/{recipe.name}").load_recipe()
            recipe = with_begun(recipe, begun)
        else:
            recipe = with_measured(with_engine(recipe, console), console)
        recipe = with_memory(recipe)
        run = world.on_rank0(opened)
        keep_in(run.path / "images")
        if resume and not has_state(run):
            world.on_rank0(lambda: finish_ended(recipe, run, console))
            return run
        if resume and world.is_rank0 and (done := run.saved_step()) >= (getattr(recipe, "steps", None) or math.inf):
            show_line(console, f"{run.path} has made all of its {done} steps; to train further, add steps={2 * done}")
        for note in precision_notes(recipe) if world.is_rank0 else ():
            show_line(console, note)
        recipe.run(run, resume=resume, overwrite=overwrite, console=console, callbacks=callbacks)
    return run
