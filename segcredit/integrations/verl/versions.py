"""Which releases of verl the plugin was tested on, and what it says about others."""

from packaging.version import Version

FIRST, BEFORE = "0.9.1", "0.9.2"
"""From this release on, and before that one."""

VARIABLE = "SEGCREDIT_VERL_UNTESTED"
"""Set to 1 in the environment, it lets the plugin load beside any verl."""


def refusal(version: str, allowed: bool = False) -> str | None:
    """Why the plugin must not load beside this verl; None: it may."""
    if allowed or Version(FIRST) <= Version(version) < Version(BEFORE):
        return None
    return (
        f"segcredit's plugin was tested with verl >={FIRST},<{BEFORE}; this is verl {version}. "
        f"Type: pip install 'verl=={FIRST}', or look for a newer segcredit. "
        f"To try this one all the same, set {VARIABLE}=1 in the environment of every node."
    )
