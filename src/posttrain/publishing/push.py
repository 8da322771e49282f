"""Upload the model of a run to the Hugging Face hub, or to a server with its interface."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from posttrain.errors import InputError, RunError
from posttrain.publishing.export import export_run
from posttrain.runs.directory import RunDirectory


def push_run(
    run: RunDirectory,
    repository: str,
    *,
    private: bool = True,
    licence: str | None = None,
    revision: str | None = None,
    target: str = "hf",
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Upload the export of `run` in one commit and return its URL. The token comes from `hf auth login` or `HF_TOKEN`.

    Raises:
        InputError: `repository` is not `USER/NAME`, or the run has no model.
        RunError: the server rejected the upload; nothing was committed.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repository.count("/") != 1 or not all(repository.split("/")):
        raise InputError(f"{repository} is not USER/NAME; give the repository as USER/NAME")
    with TemporaryDirectory(prefix="posttrain-push-") as scratch:
        out = Path(scratch) / "model"
        files = export_run(run, target, out, licence=licence, address=repository, tell=tell)
        tell(f"{len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")
        api = HfApi()
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repository, branch=revision, exist_ok=True)
            done = api.upload_folder(
                repo_id=repository,
                folder_path=out,
                revision=revision,
                commit_message=f"{run.path.name}, trained with posttrain",
            )
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"{repository}: the upload failed ({type(error).__name__}: {reason}); log in with `hf auth login`, and check the name"
            ) from error
    return str(done)
