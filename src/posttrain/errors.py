"""The errors a user is meant to read: one sentence that names the thing and the remedy."""


class PosttrainError(Exception):
    """A failure with a message for the user; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(PosttrainError):
    """Wrong input: a recipe, a file, a model or a name. Nothing was run."""

    exit_code = 2


class RunError(PosttrainError):
    """A run that started and could not go on; what it had saved is still there."""

    exit_code = 1


class WorkersLost(RunError):
    """Workers of a cluster died too often, or do not come back: nothing else that the run asks for would fare better."""
