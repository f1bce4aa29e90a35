"""The Hugging Face hub when it does not give what is asked of it: is it allowed, does it answer, what was the answer.

Libraries wrap the answer of a server in errors of many types, which differ by version; what they have in common is the
HTTP status somewhere in the chain of causes. Each status asks for something else of the user: `trouble` says what.
"""

from __future__ import annotations

import os
import re
import threading
import urllib.error
import urllib.request

from mxfp4.errors import UserError

REVISIONS = {
    "allenai/c4": ("1588ec454efa1a09f29cd18ddd04fe05fc8653a2", "MXFP4_C4_REVISION"),
    "meta-llama/Llama-3.1-8B": ("d04e592bb4f6aa9cfee91e2e20afa771667e1d4b", "MXFP4_LLAMA_REVISION"),
}
"""What is read of each repository: a commit, and the environment variable that names another."""

THROTTLED = (
    "the hub throttles (HTTP 429): wait a few minutes, or log in with `hf auth login`, which allows more, and run "
    "`mxfp4 prepare` again; it goes on where it stopped"
)


def offline() -> bool:
    """Whether the user has told the hub libraries to stay offline."""
    return any(
        os.environ.get(v, "").upper() in ("1", "ON", "YES", "TRUE") for v in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    )


def pinned(repository: str) -> str:
    """The commit that is read unless another is named."""
    return REVISIONS[repository][0]


def revision_of(repository: str, given: str | None = None) -> str:
    """The commit to read: `given`, else the environment's, else the pinned one.

    UserError where it is no commit: a branch such as main changes under the same name.
    """
    commit, variable = REVISIONS[repository]
    chosen = given or os.environ.get(variable) or commit
    if not re.fullmatch("[0-9a-f]{40}", chosen):
        raise UserError(
            f"revision {chosen!r} of {repository} is no commit: name its 40 hexadecimal digits (or unset {variable})"
        )
    return chosen


def hub_endpoint() -> str:
    """The hub's address, with no slash at its end."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def unreachable(url: str, timeout: float = 3.0) -> str:
    """Why `url` does not answer within `timeout` seconds, or "" when it does. Never raises or waits longer.

    The request runs on a thread of its own because name resolution has no time limit.
    """
    reason = [f"no answer within {timeout:g} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "mxfp4"})
            with urllib.request.urlopen(request, timeout=timeout):
                reason[0] = ""
        except urllib.error.HTTPError as error:
            reason[0] = f"HTTP {error.code} {error.reason}"
        except Exception as error:  # any failure at all means "not reachable"
            reason[0] = str(getattr(error, "reason", error)) or type(error).__name__

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return reason[0].replace("\n", " ")


NAMED = re.compile(r"\bHTTP(?: Error)? ([45]\d\d)\b|\b([45]\d\d) (?:Client|Server) Error\b")


def status_of(error: BaseException | str) -> int | None:
    """The HTTP status that an error or one of its causes carries or names; of a text, the one that it names."""
    if isinstance(error, str):
        named = NAMED.search(error)
        return int(named[1] or named[2]) if named else None
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        status = getattr(getattr(one, "response", None), "status_code", None) or status_of(str(one))
        if status is not None:
            return status
        waiting += [one.__cause__, one.__context__]
    return None


def trouble(status: int, what: str, *, allowed_by: str, instead: str) -> str:
    """What a status means for `what` on the hub and what to do, in one line.

    allowed_by: how a user comes to be allowed it. instead: where else it can come from.
    """
    if status in (401, 403):
        return f"the hub does not give {what} to this user (HTTP {status}): {allowed_by}"
    if status == 429:
        return THROTTLED
    if status >= 500:
        return (
            f"the hub has trouble of its own (HTTP {status}): wait a few minutes and run `mxfp4 prepare` again; it goes "
            "on where it stopped"
        )
    return f"{hub_endpoint()} has no {what} (HTTP {status}): correct HF_ENDPOINT if it is wrong, or {instead}"
