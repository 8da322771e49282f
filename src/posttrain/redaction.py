"""Secrets in messages: whatever enters a file or the terminal from a server or a library is written without them."""

import base64
import json
import re
from urllib.parse import quote

_secrets: set[str] = set()
"""API keys that clients of this process send, in every form that they may appear in."""
_SHORTEST = 8
"""Minimum length of a key to search for: shorter keys could occur in ordinary words."""
_LIKE_A_SECRET = re.compile(
    r"\b(?:Bearer\s+\S{8,}|Basic\s+(?=\S*[0-9=])\S{8,}|(?:(?:sk|pk|hf|gh[pousr]|github_pat|glpat|xox[abp]|xai|gsk)[-_]|AIza)[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16})|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
    # The lookahead keeps the search for a JSON web token linear in text with many "-eyJ".
    r"|(?<![\w-])(?=[\w-]+\.[\w-]{8,}\.)[\w-]*?\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
)
_NAMED_SECRET = re.compile(
    r"(?i)((?:api[-_]?key|access[-_]?token|auth[-_]?token|secret|password)\\{0,4}[\"']?\s{0,4}[=:]\s{0,4}\\{0,4}[\"']?)"
    r"(?!\[API key\])[\w.~+/%-]{8,}={0,2}"
)
"""The name of a secret, as in an address, a header, JSON or a shell, and its value."""


def redact(key: str) -> None:
    """Let `without_secrets` replace `key` from now on: as it is, and as it appears in JSON, in JSON inside JSON, in an
    address, in base64 and in hex."""
    if len(key) >= _SHORTEST:
        in_json, encoded = json.dumps(key)[1:-1], key.encode()
        _secrets.update((key, in_json, json.dumps(in_json)[1:-1], quote(key, safe=""), quote(key), encoded.hex()))
        _secrets.update((base64.b64encode(encoded).decode(), base64.urlsafe_b64encode(encoded).decode()))


def without_secrets(text: str) -> str:
    """`text` with API keys replaced: keys that clients of this process send, and text that looks like a key."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "[API key]")
    return _NAMED_SECRET.sub(r"\1[API key]", _LIKE_A_SECRET.sub("[API key]", text))
