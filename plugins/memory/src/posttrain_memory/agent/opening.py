"""Opens what the command line names: a vault, a chat client, and the agent's settings."""

import os
from datetime import datetime
from pathlib import Path
from typing import Literal

from posttrain.errors import InputError
from posttrain_memory.agent.clients import ChatClient, LocalChatClient, RemoteChatClient
from posttrain_memory.interpreter.pool import InterpreterLimits
from posttrain_memory.recipe import AgentRecipe
from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.paths import USER
from posttrain_memory.vault.storage import DiskStorage
from posttrain_memory.vault.vault import Vault

_FIRST = "# User\n"


def open_vault(folder: Path, new: bool = False, read_only: bool = False) -> Vault:
    """The vault in `folder`, locked for writing unless `read_only`.

    With `new`, a missing folder and a missing `user.md` are created. Raises InputError if something is missing, or if
    another process is writing to the vault.
    """
    if new and read_only:
        raise InputError("--new cannot be combined with --read-only; drop one")
    if new:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be created: {error.strerror}; name another folder") from None
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; name the folder of a vault, or create one with --new")
    vault = Vault(DiskStorage(folder, read_only=read_only))
    vault.report_damage()
    try:
        known = USER in vault.paths()
        if new and not known:
            vault.create(USER, _FIRST)
        elif not known:
            raise InputError(f"{folder} has no {USER}, so it is not a vault; name another folder, or add --new")
    except VaultError as error:
        vault.close()
        raise InputError(f"{folder} cannot be used as a vault: {error}") from None
    except BaseException:
        vault.close()
        raise
    return vault


def open_chat_client(
    model: str | None, url: str | None, key_variable: str | None, temperature: float | None, thinking: bool
) -> ChatClient:
    """A client for the model at the path or hub id `model`, or for the model of that name at the server `url`.

    `temperature` None: a local model is greedy, a server uses its default. InputError if arguments do not fit together.
    """
    from posttrain.recipe.model import ModelRecipe
    from posttrain.recipe.rollout import SamplingRecipe

    if model is None:
        raise InputError("no model given; use --model PATH, or --url URL --model NAME for a server")
    if url is None and key_variable is not None:
        raise InputError("--key requires --url; add --url or drop --key")
    if url is None:
        return LocalChatClient(ModelRecipe(path=model, dtype="auto"), SamplingRecipe(temperature=temperature or 0.0))
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url} is not a server address; use for example http://localhost:8000/v1")
    if key_variable is not None and not os.environ.get(key_variable):
        raise InputError(f"--key names the environment variable {key_variable}, which is not set; set it")
    return RemoteChatClient(url, model, key_variable, temperature, thinking=thinking)


def live_settings(
    max_turns: int | None,
    thinking: bool,
    prompt: Literal["full", "brief"],
    opened_by: Literal["policy", "environment", "template"],
) -> AgentRecipe:
    """The agent's settings for use: as in training, except that the code's clock shows the current time."""
    if not thinking and opened_by != "policy":
        raise InputError("--opened-by has no effect with --no-thinking; drop one")
    now = datetime.now().isoformat(timespec="seconds")
    given = {} if max_turns is None else {"max_turns": max_turns}
    return AgentRecipe(
        thinking=thinking, prompt=prompt, opened_by=opened_by, interpreter=InterpreterLimits(now=now), **given
    )
