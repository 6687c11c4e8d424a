"""Why a recipe cannot run natively."""

from __future__ import annotations


class NotExpressibleError(ValueError):
    """A backend has no form of the recipe, whatever the device; the text names the part that it lacks."""


ACCUMULATION = "a tensor core has its own accumulator; another one is emulated only"


class BackendError(RuntimeError):
    """A backend was asked for by name and the device, or what is installed, cannot run it."""
