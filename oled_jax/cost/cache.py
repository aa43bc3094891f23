"""Hardware profiles kept between runs: one JSON file per key in the user's cache directory. Imports no JAX.

A file that cannot be used is never an error: the caller measures anew and overwrites it.
"""

import dataclasses
import hashlib
import json
import os
import re
import warnings
from pathlib import Path

from oled_jax.cost.profile import HardwareProfile, ProfileKey, profile_from_json

DIRECTORY = "profiles"


def profile_path(key: ProfileKey) -> Path:
    """Where the profile of this key is kept, whether or not it exists. XDG_CACHE_HOME is honoured."""
    import platformdirs  # engines that are built without a command do not need it

    words = json.dumps(dataclasses.asdict(key), sort_keys=True)
    digest = hashlib.sha256(words.encode()).hexdigest()[:12]
    shape = f"{key.hidden}x{key.width}-{key.dtype}-{key.carrier}-{key.backend}-{key.threads}"
    device = re.sub(r"[^a-z0-9]+", "-", key.device.lower()).strip("-")
    return Path(platformdirs.user_cache_dir("oled_jax")) / DIRECTORY / f"{device}-{shape}-{digest}.json"


def load_profile(key: ProfileKey) -> tuple[HardwareProfile | None, str | None]:
    """The saved profile of this key.

    Returns:
      it, or None; and why a file that is there cannot be used, in one sentence, or None.
    """
    path = profile_path(key)
    try:
        profile = profile_from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:  # ValueError: no JSON, no UTF-8, or no profile
        reason = " ".join(str(error).split())
        return None, f"the saved hardware profile {path} cannot be used ({reason})"
    if profile.key != key:
        return None, f"the saved hardware profile {path} is that of another machine or model"
    return profile, None


def save_profile(profile: HardwareProfile) -> Path | None:
    """Writes the profile under its key, all at once. Warns and returns None where that is impossible."""
    path = profile_path(profile.key)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(profile.as_json(), indent=1, allow_nan=False), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        warnings.warn(
            f"the hardware profile cannot be saved ({error}): it will be measured again next time",
            stacklevel=2,
        )
        return None
    return path
