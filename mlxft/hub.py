"""Asks the Hugging Face hub whether it has something for us, and never for longer than a few seconds."""

import threading
from typing import Any, Optional

# A hub that has not answered by then counts as out of reach; its client would retry for minutes.
ANSWERS_WITHIN_S = 5.0


def refusal(kind: str, hub_id: str, revision: Optional[str]) -> Optional[str]:
    """Returns None if the hub has the "model" or "data set" (kind) for us, else in one line why not."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return "the hub was not asked (HF_HUB_OFFLINE is set)"
    answer: list[Any] = []

    def ask() -> None:
        ask_for = HfApi().model_info if kind == "model" else HfApi().dataset_info
        try:
            answer.append(ask_for(hub_id, revision=revision, timeout=ANSWERS_WITHIN_S))
        except Exception as error:  # handed over to the thread that waits
            answer.append(error)

    # A name that does not resolve can block for longer than any timeout of the client.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWERS_WITHIN_S)
    if not answer:
        return f"the hub ({constants.ENDPOINT}) did not answer within {ANSWERS_WITHIN_S:.0f} seconds"
    return _in_words(answer[0], kind, hub_id, revision) if isinstance(answer[0], Exception) else None


def _in_words(error: Exception, kind: str, hub_id: str, revision: Optional[str]) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{hub_id} is gated: accept its terms on the hub and log in (hf auth login)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub_id} has no revision {revision!r} on the hub"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no {kind} {hub_id}, or not for you (hf auth login)"
    return f"the hub ({constants.ENDPOINT}) cannot be reached: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
