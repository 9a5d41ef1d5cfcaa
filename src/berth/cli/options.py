"""Options that several verbs share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])


def accepting_options(function: _Function) -> _Function:
    """Add the options that accept what no probe can vouch for."""
    function = click.option(
        "--allow-volatile", is_flag=True, help="Accept a root that a restart empties (tmpfs, overlay volatile)."
    )(function)
    return click.option(
        "--trust-network", is_flag=True, help="Accept a root on a network or FUSE file system that no other host uses."
    )(function)
