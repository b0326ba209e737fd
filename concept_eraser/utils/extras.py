"""Packages that only some features need, which an extra of the package installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from concept_eraser.utils.errors import UserError


@contextmanager
def import_from_extra(extra: str, feature: str, hint: str = "") -> Iterator[None]:
    """Turn a failed import into an error that names the extra to install.

    Args:
        extra: The extra of pyproject.toml whose packages are imported inside the context.
        feature: What needs them, as the subject of the message.
        hint: A sentence that follows the message.

    Raises:
        UserError: An import inside the context failed.

    Example:
        with import_from_extra("curvature", "the method natural_gradient"):
            from curvlinops import GGNLinearOperator
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{feature} needs a package that cannot be imported here ({error}); install it with: "
            f'pip install "concept-eraser[{extra}]"' + (f". {hint}" if hint else "")
        ) from None
