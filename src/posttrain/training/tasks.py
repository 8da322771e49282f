"""Which tasks of a recipe can be played: those whose seeds exist and whose prompts leave room for an answer."""

from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.environments.protocol import Environment
from posttrain.errors import InputError
from posttrain.recipe.components import environment_class
from posttrain.recipe.stages import EvaluateRecipe, RlRecipe


def check_tasks(recipe: RlRecipe | EvaluateRecipe) -> list[str]:
    """What the environment has to say of the recipe's seeds, before a model is loaded; InputError where one of them
    has no task.
    """
    if recipe.reward is None and not environment_class(recipe.environment.type).pays(recipe.environment):
        raise InputError(
            "nothing scores the answers; name a rule or a judge in environment.rule or environment.judge, or a reward "
            "model in reward.path"
        )
    training, held_out = _ranges(recipe)
    return environment_class(recipe.environment.type).check_tasks(recipe.environment, training, held_out)


def too_long(recipe: RlRecipe | EvaluateRecipe, renderer: Renderer) -> tuple[frozenset[int], list[str]]:
    """Seeds whose prompt leaves less than `tokens_per_turn` of the episode's tokens, and one summary that names them.

    Only tasks from the user's data are looked at, and they are left out of training and evaluation; InputError if
    nothing is left of either, or, where the environment is `strict`, if any is too long.
    """
    kind = environment_class(recipe.environment.type)
    if kind.self_contained:
        return frozenset(), []
    rollout = recipe.rollout
    room = rollout.tokens_per_episode - rollout.tokens_per_turn
    problems = Problems()
    left_out = set()
    training, held_out = _ranges(recipe)
    for seeds in (training, *held_out):
        for seed in seeds:
            environment: Environment = kind(recipe.environment)
            tokens = len(renderer.prompt(environment.reset(seed).messages, environment.primer))
            if tokens > room:
                left_out.add(seed)
                detail = f"{tokens} tokens, and rollout.tokens_per_turn = {rollout.tokens_per_turn} for the answer"
                problems.add(
                    f"prompt leaves no room for an answer within rollout.tokens_per_episode = {rollout.tokens_per_episode}",
                    kind.task_name(recipe.environment, seed),
                    detail,
                )
        if len(seeds) and left_out.issuperset(seeds):
            problems.require_any(f"seeds {seeds.start} to {seeds.stop - 1} of {recipe.environment.type}")
    problems.raise_if(getattr(recipe.environment, "strict", False))
    if isinstance(recipe, RlRecipe) and len(training) - len(left_out & set(training)) < recipe.rollout.groups_per_step:
        raise InputError(
            f"fewer than rollout.groups_per_step = {recipe.rollout.groups_per_step} training prompts leave room for an "
            "answer; raise rollout.tokens_per_episode or `seeds.count`"
        )
    return frozenset(left_out), problems.summary()


def _ranges(recipe: RlRecipe | EvaluateRecipe) -> tuple[range, list[range]]:
    """Training and held-out seeds that the recipe plays."""
    evaluation = recipe.evaluation
    final = range(evaluation.final_seeds.start, evaluation.final_seeds.stop)
    if isinstance(recipe, EvaluateRecipe):
        return range(0), [final]
    curve = range(evaluation.seeds.start, evaluation.seeds.stop)
    return range(recipe.seeds.start, recipe.seeds.stop), [curve, final]
