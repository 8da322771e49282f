"""Write the model of a run for another program (transformers and vLLM, or GGUF), or upload it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from posttrain.errors import InputError, RunError
from posttrain.publishing.card import is_adapter, model_card
from posttrain.runs.directory import RunDirectory, atomic_folder, exported_model, is_used, remove_partials
from posttrain.runs.reader import is_file, read_text

TARGETS = ("hf", "gguf")


def export_run(
    run: RunDirectory,
    target: str,
    out: Path,
    *,
    kind: str = "f16",
    shard_gigabytes: float = 5.0,
    licence: str | None = None,
    address: str = "PATH",
    tell: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write the exported model of `run` to the folder `out`, with its card and recipe. Returns the files.

    Args:
        run: a run that has ended.
        target: one of `TARGETS`.
        out: a folder that does not exist, or is empty.
        kind: type of the weights of a GGUF file.
        shard_gigabytes: largest size of a safetensors file.
        licence: identifier for the card.
        address: where the card says that the model is.
        tell: called with a line of text for each check.

    Raises:
        InputError: the run has no model, the folder is not empty, or the model cannot be written in this format.
        RunError: the results of a GGUF file differ from those of the model.
    """
    if target not in TARGETS:
        raise InputError(f"--to {target} is not supported; use {', '.join(TARGETS)}")
    model = exported_model(run.path)
    if is_used(out):
        raise InputError(f"{out} exists and is not an empty folder; choose another --out")
    adapter, stage = is_adapter(model), run.load_recipe().stage
    if target == "gguf" and adapter:
        raise InputError(
            f"{model} has adapters only, and GGUF needs whole weights; train with model.lora.export=merged"
        )
    if target == "gguf" and stage == "reward":
        raise InputError(f"{model} is a reward model, which GGUF does not support; use --to hf")
    for path in (model, *sorted(model.iterdir())):
        if path.is_symlink():  # a link could put any file of this machine into an export
            raise InputError(f"{path} is a link, which is not exported; replace it by the file")
    card = model_card(run, licence, target, address)
    remove_partials(out)
    with atomic_folder(out) as folder:
        if target == "gguf":
            from posttrain.publishing.gguf import write_gguf  # imports torch

            check = write_gguf(model, folder / f"{run.path.name}.gguf", kind, run.path.name)
            tell(
                f"checked: logits of the loaded file differ by {100 * check.difference:.2g}% ({kind}), "
                f"and {100 * check.agreement:.4g}% of the best tokens agree"
            )
        else:
            copy_model(model, folder, int(shard_gigabytes * 1_000_000_000))
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / "recipe.yaml").write_text(read_text(run.recipe_file, run=run.path), encoding="utf-8")
    return sorted(file for file in out.rglob("*") if file.is_file())


def copy_model(model: Path, out: Path, shard_bytes: int) -> None:
    """Copy a transformers or peft model without hidden files. Weights larger than `shard_bytes` are split into several
    files with an index.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import safe_open

    files = sorted(model.glob("*.safetensors"))
    divide = not is_adapter(model) and sum(file.stat().st_size for file in files) > shard_bytes
    for file in sorted(model.iterdir()):
        if divide and file.name.endswith((".safetensors", "model.safetensors.index.json")):
            continue
        if is_file(file) and not file.name.startswith("."):
            shutil.copyfile(file, out / file.name)
    if divide:
        tensors: dict[str, Any] = {}
        for file in files:
            with safe_open(file, "pt") as content:
                tensors |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a mapping)
        save_torch_state_dict(tensors, out, max_shard_size=shard_bytes, metadata={"format": "pt"})


def push_run(
    run: RunDirectory,
    repository: str,
    *,
    private: bool = True,
    licence: str | None = None,
    revision: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Upload the export of `run` to the Hugging Face hub, or to a server with its interface, in one commit; returns its URL. The token comes from `hf auth login` or `HF_TOKEN`.

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
        files = export_run(run, "hf", out, licence=licence, address=repository, tell=tell)
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
