"""A run's hardware profile: the saved one, or a quick measurement that is then saved; and the words for it."""

from collections.abc import Callable

from oled_jax.cost.cache import load_profile, save_profile
from oled_jax.cost.measure import measure_quick
from oled_jax.cost.profile import HardwareProfile, ProfileKey


def profile_for(key: ProfileKey, notify: Callable[[str], None] | None = None) -> HardwareProfile:
    """The saved profile of a key, else one measured now and saved.

    Args:
      notify: told in a line or two where the profile comes from and what it says.

    Raises:
      UsageError: the CPU backend cannot run here.
    """
    said = []
    profile, problem = load_profile(key)
    if problem is not None:
        said.append(f"note: {problem}: measured again")
    if profile is not None:
        kind = "a quick measurement" if profile.quick else "python -m oled_jax.profile"
        origin = f"saved {profile.measured_at} by {kind}"
    else:
        profile = measure_quick(key)
        save_profile(profile)
        origin = (
            f"measured in {profile.seconds - profile.cpu_setup_s:.1f} s after {profile.cpu_setup_s:.1f} s to prepare "
            "the CPU backend (python -m oled_jax.profile measures it with more care)"
        )
    said.append(f"hardware profile, {origin}: {summary(profile)}")
    if notify is not None:
        for sentence in said:
            notify(sentence)
    return profile


def summary(profile: HardwareProfile) -> str:
    """The figures that policies go by."""
    costs = profile.costs
    return (
        f"transfer {costs.h2d_us:.3g} us a page; {profile.backend} with {profile.key.threads} "
        f"thread{'s' if profile.key.threads > 1 else ''} {costs.cpu_fixed_us:.3g} + {costs.cpu_token_us:.3g} n us "
        "an expert of n tokens, both at once"
    )
