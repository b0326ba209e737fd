"""The models that never learned a concept, which `--control` gives to the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from concept_eraser import api
from concept_eraser.evaluation.never_learned import NeverLearned, read_record
from concept_eraser.models.base import Model
from concept_eraser.utils.errors import UserError


def load_fitting(
    sources: Sequence[str],
    original: Model,
    *,
    concept: Mapping[str, str],
    texts: Sequence[str],
    require: Callable[[Model], None] = lambda model: None,
) -> tuple[dict[str, NeverLearned], list[str]]:
    """Load the controls that can be compared with a run.

    Args:
        sources: the names or folders of the controls.
        original: the model before the erasure. A control is sampled as it is.
        concept: attribute and value of the concept.
        texts: the prompts.
        require: raises UserError for a control that does not fit for another reason.

    Returns:
        The controls that fit, by source, and why the others do not.
    """
    controls, reasons = {}, []
    for source in sources:
        try:
            model = api.load(source, base=original)
            if model.family == original.family:
                model.configure(original.configured())
            control = NeverLearned(model, read_record(source))
            control.require_comparable(original, concept, texts)
            require(model)
            controls[source] = control
        except UserError as error:
            reasons.append(str(error))
    return controls, reasons
