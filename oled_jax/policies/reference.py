"""`all`: every expert resident. Listed with the policies, but nothing is ever decided."""

from typing import NoReturn

from oled_jax.errors import UsageError
from oled_jax.policies.base import PolicyContext
from oled_jax.policies.options import NoOptions, PolicyEntry


def refuse(options: NoOptions, context: PolicyContext) -> NoReturn:
    """Raises UsageError: the engine must not ask for a cache policy here."""
    raise UsageError("policy 'all' keeps every expert resident and has no cache to manage")


ENTRIES = (
    PolicyEntry(
        name="all",
        summary="every expert resident, no cache: the reference for losslessness and speed",
        build=refuse,
        is_reference=True,
    ),
)
