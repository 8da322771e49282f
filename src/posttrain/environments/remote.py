"""Clients of OpenAI-compatible servers."""

import os
from functools import lru_cache
from typing import Any

from posttrain.errors import InputError


@lru_cache(maxsize=8)
def chat_client(what: str, url: str, seconds: float, retries: int, api_key_variable: str | None) -> Any:
    """The client of a server, one for all threads. `what`: the section of the recipe that names it, for messages;
    `seconds` limits a call. InputError where the package is missing, or the key is named and not set."""
    try:
        import openai
    except ModuleNotFoundError as error:
        raise InputError(f"{what} needs the package openai; `pip install openai`") from error
    key = "none"
    if api_key_variable is not None:
        key = os.environ.get(api_key_variable, "")
        if not key:
            raise InputError(f"{what}.api_key_variable names {api_key_variable}, which is not set; export it")
    return openai.OpenAI(base_url=url, api_key=key, timeout=seconds, max_retries=retries)
