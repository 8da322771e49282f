"""What every stage has: keys of directories and checkpoints, the environment of stages that use one, and the
methods by which a stage declares what it loads, its warnings, its batches and its memory."""

import json
import math
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.base import CONNECTS, NAME, BaseConfig, Connects, Text, Writes
from posttrain.recipe.components import AnyEnvironment, environment_recipe
from posttrain.recipe.detectable import FEWEST
from posttrain.recipe.engines import LocalEngineRecipe, PolicyEngineRecipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.metrics import TRAINING, Metric, Panel
from posttrain.recipe.model import LearnerRecipe, ModelRecipe, OptimizerRecipe
from posttrain.recipe.needs import TRAINED, Needs, needs, unless
from posttrain.recipe.plan import ACTIVATIONS, GATHERED, Items, Plan, TaskSplit, counted, named_tasks, plural
from posttrain.recipe.rollout import (
    ANSWERS,
    LOADED,
    REJECTED,
    RETURN,
    TURNS,
    RolloutRecipe,
    SeedRange,
    evaluated_environment,
    refuse_overlap,
)


class CheckpointRecipe(BaseConfig):
    """When checkpoints are saved, and which are kept: the latest whole, of others the policy, which every `model.path` accepts."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints. One is always written at the end, and on Ctrl-C or SIGTERM."""
    keep: Annotated[int, Field(ge=1)] | Literal["all"] = 2
    """Number of latest checkpoints to keep whole, so that a run can resume from them. Of the best one, the policy is kept as well. `all`: keep the latest two whole, and the policies of all others."""
    keep_state: Literal["while_running", "always"] = "while_running"
    """`while_running`: when the run has ended, the policies of the newest checkpoint and of the best remain (with `keep: all` every one), so it cannot be continued. `always`: the latest ones stay whole, so that `--resume RUN steps=N` can continue the run."""

    asynchronous: bool = False
    """Copy the state to CPU memory and write it in a thread while training goes on. Takes as much CPU memory as a checkpoint has bytes; the first of several processes gathers the policy. A run killed during the writing resumes from the checkpoint before."""


ExportedStep = Literal["best", "last", "best_by_audit"]
BY_AUDIT: ExportedStep = "best_by_audit"
"""The audit selects the checkpoint."""
SinkName = Literal["tensorboard", "wandb", "trackio"]
LOGGED_IN = ("runs", "sinks", "tracking", "plots")
"""Keys that control only storage, logging and figures of a run. They do not change its results."""


def _read_by(*sinks: str) -> Needs:
    """The need of keys that only `sinks` read."""
    return Needs(
        lambda find: not set(sinks).isdisjoint(find("sinks")),
        lambda find: f"sinks is {json.dumps(find('sinks'))}",
        f"add {' or '.join(sinks)} to sinks",
    )


class TrackingRecipe(BaseConfig):
    """Where, under which name and with how many completions the sinks record the run. W&B reads tags from the environment variable `WANDB_TAGS`."""

    project: Annotated[Connects | None, _read_by("wandb", "trackio")] = Field(None, min_length=1)
    """Project. Null: for W&B the environment variable `WANDB_PROJECT`, else `posttrain`."""
    entity: Annotated[Connects | None, _read_by("wandb")] = Field(None, min_length=1)
    """W&B user or team that owns the project. Null: the environment variable `WANDB_ENTITY`, else the account's default."""
    run_name: Annotated[Text | None, _read_by("wandb", "trackio")] = Field(None, min_length=1)
    """Name of the run in the project. Null: for W&B the environment variable `WANDB_NAME`, else `name`."""
    group: Annotated[Text | None, _read_by("wandb", "trackio")] = Field(None, min_length=1)
    """Group of runs in the project, as for the seeds of one recipe. Null: for W&B the environment variable `WANDB_RUN_GROUP`, else none."""
    completions: Annotated[int, needs("sinks"), TRAINED] = Field(0, ge=0)
    """Training episodes per step that the sinks show as a table, with their texts, from the first groups of the step. 0: none."""


ENTROPY = Panel("Entropy", "nats per token", figure="entropy")
REPETITION = Panel("Repetition", "share of sampled tokens", percent=True, figure="entropy")
SPREAD = Panel("Spread within groups", "standard deviation", figure="reward")


class StageRecipe(BaseConfig):
    """A run of one stage. A stage is a subclass with the field `stage: Literal[NAME] = NAME`, see `register_stage`.

    Planning, dry runs, warnings and reports call the methods of this class, and name no stage.
    """

    if TYPE_CHECKING:
        stage: Any

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("time/run", "seconds since the run started"),
        Metric("time/step", "seconds of the step"),
        Metric("time/*", "seconds of a phase of the step"),
        Metric("speed/tokens_per_second", "tokens per second: sampled, or trained on"),
    )

    name: Text = Field("run", pattern=NAME)
    """Name of the run. Its directory is `<runs>/<name>`."""
    runs: Writes = "runs"
    """Directory that holds the runs."""
    seed: int = Field(0, ge=0)
    """Run seed; every random number is derived from it."""
    model: Annotated[ModelRecipe, LOADED] = ModelRecipe()
    sinks: Annotated[list[SinkName], CONNECTS] = []
    """Additional metric loggers; `metrics.jsonl` is always written."""
    tracking: TrackingRecipe = TrackingRecipe()
    plots: Annotated[bool | None, unless("stage", "evaluate", "generate")] = None
    """Whether a training run draws its figures when it ends. `posttrain plot` draws them at any time. Null: unless the environment variable `POSTTRAIN_PLOTS` is 0."""

    @property
    def draws_plots(self) -> bool:
        """Whether a training run draws its figures: `plots`, else the environment variable."""
        return os.environ.get("POSTTRAIN_PLOTS") != "0" if self.plots is None else self.plots

    trains: ClassVar[bool] = False
    """Whether the stage trains a model."""
    scores: ClassVar[bool] = False
    """Whether the trained model is a reward model."""
    on_policy: ClassVar[bool] = False
    """Whether the stage trains on episodes that it samples."""
    on_cluster: ClassVar[bool] = False
    """Whether the stage can run on a Ray cluster."""
    chooses_engine: ClassVar[bool] = False
    """Whether a recipe without `engine` gets the fastest engine of the machine."""

    def too_few(self, count: int) -> list[str]:
        """A sentence if the verdict is tested on so few held-out tasks or rows, `count`, that it cannot show any change."""
        return []

    def run(self, directory: Any, *, resume: bool, overwrite: bool, console: Any, callbacks: Sequence[Any]) -> None:
        """Run the stage in this process.

        Args:
            directory: the `RunDirectory` of the run, new or to be continued.
            resume: continue from the newest checkpoint.
            overwrite: files outside of the run directory may be replaced.
            console: rich console for progress.
            callbacks: objects of `Callback`.
        """
        raise NotImplementedError

    def check(self) -> list[str]:
        """Load what the run loads before its model, besides what the sections of the recipe name. Returns lines for
        `--dry-run`; raises InputError as the run does."""
        return []

    def warnings(self) -> list[str]:
        """Sentences about unusual values. Keys without effect are found by `recipe_warnings`."""
        return []

    def batch_lines(self, tasks: TaskSplit | None) -> list[str]:
        """Batch arithmetic, one line per part. `tasks`: the tasks of a stage with an environment; None: not known yet."""
        return []

    def memory_items(self, plan: Plan) -> Items:
        """What is in the memory of one device, without the engine."""
        return self.model.memory_items(plan.sizes)

    def engine_items(self, plan: Plan) -> Items:
        """What the engine has in the memory of one of its devices."""
        if self.sampler is None:
            return {}
        return self.sampler.memory_items(plan, self.model, self.rollout.tokens_per_episode)  # type: ignore[attr-defined]

    def engine_refusal(self, plan: Plan) -> str | None:
        """Why the engine would not start on the plan's device; None if it would."""
        if self.sampler is None:
            return None
        return self.sampler.refusal(plan, self.model, self.rollout.tokens_per_episode)  # type: ignore[attr-defined]

    def models(self) -> dict[str, Any]:
        """Key -> section of each model that the run loads from a `path`, the model itself first."""
        return {} if self.remote is not None else {"model": self.model}

    @property
    def sampler(self) -> Any:
        """The section of the engine if the run samples episodes or answers, else None."""
        return getattr(self, "engine", None)

    @property
    def remote(self) -> Any:
        """The section of the engine if a remote model answers and no model is loaded, else None."""
        engine = getattr(self, "engine", None)
        return engine if engine is not None and engine.type == "openai" else None

    @property
    def ahead(self) -> int:
        """Steps by which sampling runs ahead of learning."""
        return 0

    @property
    def training_seeds(self) -> tuple[SeedRange | None, str]:
        """Seeds of the tasks to train on, and their key; None if the run trains on none."""
        return None, "seeds"

    @property
    def is_scored(self) -> bool:
        """Whether the run needs no reward of the environment."""
        return getattr(self, "reward", None) is not None

    @property
    def outputs(self) -> list[Path]:
        """Files and folders that must not exist when a run starts."""
        return [Path(self.runs) / self.name]


def imported(place: str) -> Any:
    """The object at `module:name`. Recipes are read without torch, so what runs them is imported when it is used."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def refuse_longer(
    recipe: BaseConfig, section: str, key: str, most: int, what: str = "one episode", count: int = 1
) -> None:
    """ValueError if `what` does not fit into a forward pass of `section`: `count` times the `most` tokens that `key` allows."""
    limit, times = getattr(recipe, section).tokens_per_batch, f"{count} x " if count > 1 else ""
    if count * most > limit:
        tokens = f"{times}`{key}` = {count * most} tokens, more than `{section}.tokens_per_batch` = {limit}"
        raise ValueError(f"{what} may have {tokens}; raise the latter or lower the former")


class TrainedRecipe(StageRecipe):
    """A stage that trains a model. Its subclasses declare the keys in the order in which they are shown."""

    if TYPE_CHECKING:
        optimizer: OptimizerRecipe
        learner: LearnerRecipe
        checkpoint: CheckpointRecipe
        export: ExportedStep
        hardware: HardwareRecipe
        evaluation: Any

    run_by: ClassVar[str]
    """`module:function` with the loop of the stage."""
    trains: ClassVar[bool] = True
    on_cluster: ClassVar[bool] = True

    def run(self, directory: Any, *, resume: bool, overwrite: bool, console: Any, callbacks: Sequence[Any]) -> None:
        imported(self.run_by)(self, directory, resume, console, callbacks)

    def _check_audit(self) -> None:
        audit = getattr(self, "audit", None)
        if audit is None:
            if self.export == BY_AUDIT:
                raise ValueError("`export: best_by_audit` needs a second scorer; set `audit`, or use best or last")
            return
        if self.evaluation.every == 0:
            raise ValueError("`audit` scores the answers of the learning curve; set `evaluation.every` above 0")
        if audit.path is not None and (self.hardware.learners > 1 or self.hardware.ray is not None):
            raise ValueError("`audit.path` is for one process without `hardware.ray`; use `audit.environment`")
        played = evaluated_environment(self)
        if audit.environment is None or played is None:
            return
        if getattr(self, "agent", None):
            raise ValueError("`audit.environment` cannot play the agents' tasks again; set `audit.path` instead")
        if (key := played.other_tasks(audit.environment)) is not None:
            where = "environment" if getattr(self.evaluation, "environment", None) is None else "evaluation.environment"
            raise ValueError(
                f"`audit.environment.{key}` differs from `{where}.{key}`, so the audit could score other tasks; remove it, or "
                "add the key to `scoring` of the environment's recipe class if it only changes scores"
            )

    def _check(self) -> None:
        self._check_audit()
        hardware = self.hardware
        if hardware.offload != "none" and any(optimizer.type == "adamw_8bit" for optimizer in self.optimizers):
            raise ValueError(
                "`optimizer.type: adamw_8bit` keeps its state on the GPU; use `adamw`, or no `hardware.offload`"
            )
        if self.model.load_in_4bit and (hardware.learners > 1 or hardware.offload == "all"):
            raise ValueError(
                "`model.load_in_4bit` is for one process without `hardware.offload: all`; remove one of them"
            )
        if hardware.deterministic and getattr(getattr(self, "engine", None), "weight_transfer", "files") == "nccl":
            raise ValueError(
                "with `hardware.deterministic`, `engine.weight_transfer: nccl` would hang, because vLLM sets up its communication "
                "differently from the learner; use `ipc` or `files`"
            )

    @property
    def optimizers(self) -> list[OptimizerRecipe]:
        """The sections of the optimizers that the run has."""
        return [self.optimizer]

    @property
    def logit_bytes(self) -> int:
        """Bytes that a logit of the loss takes in a forward and backward pass."""
        return 4

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number that is kept for the backward pass."""
        return self.model.weight_bytes

    @property
    def separable(self) -> list[str]:
        """The keys of `hardware.dedicated` for which the run has a model."""
        return []

    @property
    def tested_key(self) -> str:
        """The key of the held-out tasks or rows on which the run's verdict is tested."""
        played, data = evaluated_environment(self), getattr(self, "data", None)
        if played is not None and self.evaluation.metric != "loss":
            return "evaluation.held_out" if played.rows_key else "evaluation.final_seeds.count"
        if data is None:
            return "experts.held_out"
        return next((f"data.{part}" for part in ("test", "validation") if getattr(data, part)), "data.held_out")

    def untested(self) -> str | None:
        """Why a run of this recipe has no verdict, by its keys, with the remedy; None if nothing is known against one."""
        key, data = self.tested_key, getattr(self, "data", None)
        if self.evaluation.every == 0:
            return "evaluation.every is 0, so the model is not measured before training; set it above 0"
        if not getattr(self.evaluation, "start", True):
            return "evaluation.start is false, so the model is not measured before training; set it to true"
        if key == "data.held_out" and data is not None and not data.held_out:
            return "no rows are held out; set data.held_out"
        return None

    def too_few(self, count: int) -> list[str]:
        if count >= FEWEST or self.untested():
            return []
        left = counted(count, f"held-out {'row' if self.tested_key.startswith('data.') else 'task'}")
        why = f"fewer than {FEWEST} cannot show that anything was learned"
        return [f"{self.tested_key} leaves {left} for the verdict, and {why}; hold out more"]

    def process_lines(self) -> list[str]:
        """How several processes divide the work; empty for one process."""
        count, row = self.hardware.learners, self.hardware.sequence_parallel
        if count == 1:
            return []
        play = f" and the {self.rollout.groups_per_step} groups" if self.on_policy else ""  # type: ignore[attr-defined]
        who = f"{count} processes" + (f", of which each {row} compute a row together," if row > 1 else "")
        held = f"each holds 1/{count // self.hardware.replicas} of the model's state"
        return [f"{who} divide the forward passes of each update{play}; {held}"]

    def memory_items(self, plan: Plan) -> Items:
        """What is in the memory of one learner device: `state_items`, which sharding divides, and `pass_items`."""
        items, sizes = plan.divided(self.state_items(plan)) | self.pass_items(plan), plan.sizes
        if plan.placement.shard > 1 or self.hardware.offload == "all":
            whole, width = not self.hardware.reshard_after_forward, self.model.weight_bytes
            held, logits = (items.get(what, (0, ""))[0] for what in (ACTIVATIONS, "logits"))
            inputs = held
            if (checkpointing := self.model.gradient_checkpointing) is not False:
                tokens = self.learner.tokens_per_batch // self.hardware.sequence_parallel
                each = sizes.kept_products if checkpointing == "selective" else sizes.hidden
                inputs = width * tokens * sizes.layers * each
            size = sizes.gathered_bytes(width, inputs, held, logits, self.model.lora is None, self.scores, whole)
            what = "all weights" if whole else "two layers"
            items[GATHERED] = (size, f"{what}, embeddings and output projection, with gradients of one layer")
        return items

    def state_items(self, plan: Plan) -> Items:
        """The models of the run, and the state of the optimizers."""
        trained, offloads = self.model.trained_parameters(plan.sizes, self.scores), self.hardware.offload == "optimizer"
        held = trained if offloads or plan.placement.shard > 1 else min(trained, plan.sizes.head)
        return {
            **self.model.memory_items(plan.sizes, self.scores),
            **self.optimizer.memory_items(trained, held, self.model.weight_bytes, offloads),
            **self.model_items(plan),
        }

    def models(self) -> dict[str, Any]:
        audit = getattr(self, "audit", None)
        return super().models() | ({} if audit is None or audit.path is None else {"audit": audit})

    def model_items(self, plan: Plan) -> Items:
        """The models besides the trained one."""
        how = (4 * plan.sizes.scorer_parameters, "assuming the size of the policy")
        return {"reward model of the audit": how} if "audit" in self.models() else {}

    def pass_items(self, plan: Plan) -> Items:
        """What a forward and backward pass keeps. Activations are a rough estimate."""
        sizes, width, count = plan.sizes, self.activation_bytes, self.hardware.sequence_parallel
        limit = f"learner.tokens_per_batch {self.learner.tokens_per_batch}" + (f" / {count}" if count > 1 else "")
        tokens = -(-self.learner.tokens_per_batch // count)
        kept = sizes.kept_activations
        if count > 1:  # outputs of attention, before and after heads and tokens change places
            kept += sizes.heads * sizes.head_size
        per_token, how = width * sizes.layers * kept, "every layer"
        if self.model.gradient_checkpointing:
            selective = self.model.gradient_checkpointing == "selective"
            inputs, what = (sizes.kept_products, "products") if selective else (sizes.hidden, "inputs")
            per_token = width * (sizes.layers * inputs + kept + sizes.backward_activations)
            how = f"all of one layer and of its backward pass, {what} of the others"
        held = tokens * per_token
        if self.model.lora is not None and self.model.lora.targets == "all-linear" and sizes.experts:
            # peft computes with the sum of the experts' weights and their adapters, and with its gradient.
            layers = 1 if self.model.gradient_checkpointing else sizes.layers
            held += width * sizes.experts * sizes.expert * (2 * layers + 1) // 2
            how += ", weights of experts with adapters"
        items = {ACTIVATIONS: (held, f"{limit}, {how}")}
        if self.scores:
            return items
        chunk, each = self.learner.logits_per_chunk, self.logit_bytes
        how = f"learner.logits_per_chunk {chunk} x {sizes.vocabulary:,} x {each} bytes"
        return items | {"logits": (each * chunk * sizes.vocabulary, how)}

    def reference_items(self, plan: Plan, moves: bool, averages: bool) -> Items:
        """A reference model. `moves`: it is updated during training; `averages`: as a moving average."""
        if self.model.lora is not None:
            return {"reference model": (0, "the policy with adapters disabled")}
        # Sharded models are moved by FSDP alone, with `all`; see `planning.memory.process_memory`.
        if self.hardware.offload in ("optimizer", "rollouts") and plan.placement.shard == 1:
            return {"reference model": (0, "in CPU memory, and on the device when there are no gradients")}
        width, count = self.model.weight_bytes, plan.sizes.parameters
        if moves and averages and width == 2:
            how = "a copy of the model, and its moving average in float32"
            return {"reference model": (width * count + 4 * self.model.trained_parameters(plan.sizes), how)}
        how = "a copy of the model, updated during training" if moves else "a copy of the initial model"
        return {"reference model": (width * count, how)}


class PlayedRecipe(StageRecipe):
    """A stage that runs episodes of an environment."""

    environment: AnyEnvironment = Field(default_factory=lambda: environment_recipe({"type": "bandit"}))
    """The environment; its keys depend on `environment.type`."""


class SampledRecipe(PlayedRecipe, TrainedRecipe):
    """A stage that trains on the episodes that the policy samples."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rollout/return", "training episodes", RETURN, TRAINING),
        Metric("rollout/success", "success of the training episodes"),
        Metric("rollout/score/*", "mean of a score of the training episodes"),
        Metric("rollout/score_n/*", "number of training episodes with this score"),
        Metric("rollout/tokens_per_answer", "training", ANSWERS, TRAINING),
        Metric("rollout/turns", "training", TURNS, TRAINING),
        Metric("rollout/rejected_share", "training", REJECTED, TRAINING),
        Metric("rollout/truncated_share", "share of answers that ended at a limit on tokens"),
        Metric("rollout/same_answer_share", "share of answers that are the most frequent answer of the step"),
        Metric("rollout/episodes", "episodes of the step"),
        Metric("rollout/kept", "episodes of the step after `rollout.filter`"),
        Metric("rollout/failed", "episodes that failed"),
        Metric("rollout/unscored", "episodes to which no reward applies"),
        Metric("reward/group_spread", "mean standard deviation of a group's returns", SPREAD, TRAINING),
        Metric("policy/entropy", "entropy of the policy", ENTROPY),
        Metric("policy/repeated_share", "same token twice in a row", REPETITION),
        Metric("tokens/sampled", "tokens sampled"),
        Metric("tokens/prefilled", "prompt tokens computed"),
        Metric("tokens/reused", "prompt tokens taken from the cache"),
        Metric("tools/calls", "well-formed tool calls per episode"),
        Metric("tools/failed_share", "share of well-formed calls with an unknown tool, wrong arguments or an error"),
        Metric("tools/malformed_share", "share of all calls that could not be parsed"),
        Metric("time/weights", "seconds of sending weights to the engine, part of `time/rollout`"),
    )

    steps: int = Field(100, ge=1)
    """Number of steps. Each samples groups_per_step x episodes_per_group episodes and makes updates_per_step x epochs_per_step updates."""
    max_minutes: float | None = Field(None, gt=0)
    """Start no step after this many minutes; the run then ends as usual. Null: no limit."""
    seeds: SeedRange = SeedRange()
    """Training seeds of the environment, reshuffled on every pass over them. Usual for generated tasks: 100,000 from 0 on; for rows of a file: all that are not held out."""
    engine: PolicyEngineRecipe = LocalEngineRecipe()
    """Engine that samples episodes: in this process on the weights in training, or vLLM."""
    rollout: RolloutRecipe = RolloutRecipe()
    export: ExportedStep = "best"
    """Which checkpoint becomes `model/`, and is measured for the final table: the best one of the evaluations, the last one, or the one with the best mean score of `audit`. Of evaluations with the same value of `evaluation.metric`, the one with the lower `validation/loss` is the best, then the later one."""

    on_policy: ClassVar[bool] = True
    chooses_engine: ClassVar[bool] = True

    def _check(self) -> None:
        self.engine.check(self.model)
        rollout, learner = self.rollout, self.learner
        refuse_overlap({"seeds": self.seeds}, self.environment, self.evaluation)
        groups, seeds, updates = rollout.groups_per_step, self.seeds.count, learner.updates_per_step
        if seeds is not None and groups > seeds:
            raise ValueError(
                f"`rollout.groups_per_step` ({groups}) is more than `seeds.count` ({seeds}); lower the former"
            )
        if updates > groups:
            raise ValueError(
                f"`learner.updates_per_step` ({updates}) is more than the groups of a step ({groups}); lower it, or raise "
                "`rollout.groups_per_step`"
            )
        refuse_longer(self, "learner", "rollout.tokens_per_episode", rollout.tokens_per_episode)

    @property
    def training_seeds(self) -> tuple[SeedRange | None, str]:
        return self.seeds, "seeds"

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.learner.updates_per_step * self.learner.epochs_per_step

    def warnings(self) -> list[str]:
        """Limits of episodes, and values of the optimizer, that are unusual."""
        evaluated = evaluated_environment(self)
        assert evaluated is not None
        warnings = self.rollout.warnings(self.environment.max_turns, evaluated.max_turns)
        if self.model.lora is None and self.optimizer.learning_rate > 1e-4:
            stage = "distillation" if self.stage == "distill" else self.stage
            rate = f"{self.optimizer.learning_rate:g}"
            warnings.append(f"optimizer.learning_rate {rate} is high for full-parameter {stage}")
        return warnings

    def batch_lines(self, tasks: TaskSplit | None) -> list[str]:
        """Episodes, updates and forward passes of a step and of the run, and its tasks and evaluations."""
        rollout, learner, updates = self.rollout, self.learner, self.updates
        groups, size = rollout.groups_per_step, rollout.episodes_per_group
        episodes, taken = groups * size, self.steps * groups
        per_update = math.ceil(groups / learner.updates_per_step) * size
        passes = math.ceil(per_update / (learner.tokens_per_batch // rollout.tokens_per_episode))
        count = len(tasks.training) if tasks is not None else 0
        used = f"each used about {taken / count:.1f} times" if 0 < count < taken else f"{taken:,} of them used"
        return [
            f"{counted(groups, 'group')} x {counted(size, 'episode')} = {episodes} episodes per step",
            f"{counted(learner.updates_per_step, 'update')} per step x {counted(learner.epochs_per_step, 'epoch')} = "
            f"{updates} optimizer {plural('step', updates)} per step, each on about {per_update} episodes",
            f"forward passes of at most {learner.tokens_per_batch} tokens; at most {passes} per optimizer step, with "
            f"episodes of {rollout.tokens_per_episode} tokens",
            f"{counted(self.steps, 'step')}: {self.steps * episodes:,} episodes and {self.steps * updates:,} optimizer "
            f"{plural('step', self.steps * updates)}",
            *self.work_lines(),
            f"training on {named_tasks(tasks, 0)}, {used}",
            *self.evaluation.batch_lines(tasks, self.steps),
            *self.process_lines(),
        ]

    def work_lines(self) -> list[str]:
        """Work of a step besides the episodes and the updates of the policy."""
        return []
