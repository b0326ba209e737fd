"""Which images of the bundled data set a training leaves out, such as `shape=heart`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from concept_eraser.tiny.painter import (
    BACKGROUNDS,
    COLORS,
    SHAPES,
    STYLES,
    PaintedScene,
)
from concept_eraser.utils.errors import UserError

VALUES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "color": COLORS,
    "style": STYLES,
    "background": BACKGROUNDS,
}


@dataclass(frozen=True)
class Exclusion:
    """Values of attributes that no training image has, as (attribute, value) in a fixed order."""

    concepts: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def read(cls, texts: Sequence[str]) -> Exclusion:
        """Read `attribute=value` or `attribute=value,value`, each once or several times.

        Raises:
            UserError: an attribute or a value is unknown, or an attribute keeps no value.
        """
        wanted: set[tuple[str, str]] = set()
        for text in texts:
            attribute, _, values = (part.strip() for part in text.partition("="))
            if attribute not in VALUES:
                raise UserError(
                    f"--without {text}: unknown attribute {attribute!r}; write ATTRIBUTE=VALUE "
                    f"with one of {', '.join(VALUES)}"
                )
            for value in (part.strip() for part in values.split(",")):
                if value not in VALUES[attribute]:
                    raise UserError(
                        f"--without {text}: unknown {attribute} {value!r}; use one of "
                        f"{', '.join(VALUES[attribute])}"
                    )
                wanted.add((attribute, value))
        for attribute, options in VALUES.items():
            if all((attribute, value) in wanted for value in options):
                raise UserError(
                    f"--without excludes every {attribute}, so no image is left; exclude fewer"
                )
        ordered = [(a, v) for a, options in VALUES.items() for v in options if (a, v) in wanted]
        return cls(tuple(ordered))

    def covers(self, scene: PaintedScene) -> bool:
        """Whether the scene shows one of the values."""
        return any(getattr(scene, attribute) == value for attribute, value in self.concepts)

    def as_dict(self) -> dict[str, list[str]]:
        """Return attribute -> values, for JSON."""
        values: dict[str, list[str]] = {}
        for attribute, value in self.concepts:
            values.setdefault(attribute, []).append(value)
        return values

    def folder_name(self) -> str:
        """Return a name for a folder, such as `without-heart`, or `full` without an exclusion."""
        return "-".join(["without", *(value for _, value in self.concepts)] if self else ["full"])

    def __bool__(self) -> bool:
        return bool(self.concepts)

    def __str__(self) -> str:
        return ", ".join(f"{attribute}={value}" for attribute, value in self.concepts) or "nothing"
