"""Turns what `--model` says into a directory: a path as it is, a hub id through huggingface_hub's cache."""

import re
from pathlib import Path

from oled_jax.errors import UsageError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NEEDED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
NESTED_FILES = ["*/*"]  # copies in other formats or precisions


def resolve_model(model: str) -> Path:
    """The directory of a checkpoint.

    Args:
      model: a directory, or a hub id "org/name" (an existing directory of that name comes first). A hub id is
        taken from the cache or downloaded; HF_HOME, HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE are honoured.

    Raises:
      UsageError: no such directory; or the hub has no such model, does not give it out, or cannot be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir() and model:  # Path("") is the current directory
        return path
    if path.is_file():
        raise UsageError(f"model {model} is a file: give the directory that holds its config.json")
    if not HUB_ID.fullmatch(model):
        raise UsageError(f"model {model!r} is neither a directory nor a hub id (org/name)")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    import huggingface_hub  # takes half a second to import, and a local directory does not need it
    from huggingface_hub import constants, errors

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=NEEDED_FILES, ignore_patterns=NESTED_FILES))
    except errors.GatedRepoError as error:
        reason = "is gated: accept its terms on its hub page, then log in (hf auth login) or set HF_TOKEN"
        raise UsageError(f"model {model} {reason}") from error
    except errors.RepositoryNotFoundError as error:
        reason = "is no directory here and not on the hub: check the name; if it is private, set HF_TOKEN"
        raise UsageError(f"model {model} {reason}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        held = f"is no directory here and not (completely) in the hub cache {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set: unset it to download the model, or give a directory"
        else:
            reason = "the hub cannot be reached: check the network, or give a directory"
        raise UsageError(f"model {model} {held}, and {reason}") from error
    except Exception as error:  # the HTTP library under huggingface_hub, and so its exceptions, differ by version
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"model {model} could not be fetched from the hub ({cause}): try again") from error
