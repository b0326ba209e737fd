"""The clock of the page: every second it fetches the state of the jobs, and only the changes are
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from concept_eraser.demo import attack, compare, erase, labelled, results, safety
from concept_eraser.demo.context import Desk, choices, sentence, strip

SECOND, QUIET = 1.0, 4.0  # between two looks: while a job is in work, and while none is


def texts(desk: Desk) -> dict[str, str]:
    """What is shown of jobs and runs, by place."""
    return {
        "strip": strip(desk),
        "erase": erase.live(desk, erase.latest(desk, "erase")),
        "attack": attack.live(desk, erase.latest(desk, "attack")),
        "offer": compare.invitation(desk),
        "table": results.runs_table(desk),
        "measured": results.live(desk, erase.latest(desk, "measure")),
    }


def lists(desk: Desk) -> dict[str, list]:
    """What can be chosen, by kind: jobs to cancel, runs that draw, runs to resume, runs on labelled
    data.
    """
    library = desk.library
    return {
        "active": choices(desk.jobs.all()),
        "drawn": library.finished_runs(),
        "left": library.unfinished_runs(),
        "images": library.finished_runs(labelled.TARGETS),
    }


def changes(gr: Any, desk: Desk, sent: dict[str, Any], chosen_runs: Sequence[str]) -> list[Any]:
    """Updates of the components in the order of `outputs`. known: what this browser was sent
    before.
    """
    messages, now = texts(desk), lists(desk)
    state = {**{name: hash(text) for name, text in messages.items()}, **now}
    is_changed = {name: state[name] != sent.get(name) for name in state}
    active, image_runs = now["active"], now["drawn"]

    def update(names: Sequence[str], make: Callable[[], Any]) -> Any:
        return make() if any(is_changed[name] for name in names) else gr.skip()

    def menu(name: str) -> Any:  # what somebody has chosen stays chosen
        return gr.Dropdown(
            now[name], **({} if sent.get(name) else {"value": next(iter(now[name]), None)})
        )

    new = [name for name in image_runs if name not in sent.get("drawn", image_runs)]
    selection = [name for name in chosen_runs or [] if name in image_runs]
    return [
        *(text if is_changed[name] else gr.skip() for name, text in messages.items()),
        state,
        update(["active"], lambda: gr.Row(visible=bool(active))),
        update(["active"], lambda: gr.Dropdown(active, value=active[0][1] if active else None)),
        update(["active"], lambda: gr.Timer(SECOND if active else QUIET)),
        # at first the address of the page says which are chosen, see page._opened
        update(
            ["drawn"] if sent else [],
            lambda: gr.CheckboxGroup(image_runs, value=(new + selection)[: safety.COLUMNS]),
        ),
        update(["drawn"], lambda: menu("drawn")),
        update(["drawn"], lambda: menu("drawn")),
        update(["left"], lambda: gr.Dropdown(now["left"], value=next(iter(now["left"]), None))),
        update(["drawn"], lambda: gr.Dropdown(erase.models(desk))),
        update(["images"], lambda: menu("images")),
        update(["drawn", "active"], lambda: gr.Button(visible=not image_runs and not active)),
    ]


def wind(
    gr: Any,
    desk: Desk,
    parts: dict[str, Any],
    jobs: Any,
    row: Any,
    which: Any,
    events: Sequence[Any],
) -> None:
    """Let the clock tick; after an event (a job was asked for, or cancelled) the page looks at
    once.
    """
    clock, last = gr.Timer(SECOND), gr.State({})
    components = [
        jobs,
        parts["Erase"]["shown"],
        parts["Attack"]["shown"],
        parts["Compare"]["offer"],
        parts["Results"]["mine"],
        parts["Results"]["shown"],
    ]
    menus = [
        parts["Compare"]["runs"],
        parts["Attack"]["run"],
        parts["Results"]["run"],
        parts["Erase"]["left"],
        parts["Erase"]["model"],
        parts["Images"]["run"],
        parts["Compare"]["first"],
    ]
    outputs = [*components, last, row, which, clock, *menus]

    def look(sent: dict[str, Any], chosen_runs: list[str]) -> list[Any]:
        try:
            return changes(gr, desk, sent, chosen_runs)
        except Exception as error:  # a file that is being written; the next second looks again
            sentence(error)
            return [gr.skip()] * len(outputs)

    for event in (clock.tick, *(event.then for event in events)):
        event(
            look,
            [last, parts["Compare"]["runs"]],
            outputs,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
