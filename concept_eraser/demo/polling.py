"""The timer of the page. It updates the state of the jobs, and sends only the changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from concept_eraser.demo import attack, compare, erase, labelled, results, safety
from concept_eraser.demo.context import Desk, cancellable_jobs, error_text, job_list

ACTIVE_INTERVAL, IDLE_INTERVAL = 1.0, 4.0  # seconds between two updates: with active jobs, without


def texts(desk: Desk) -> dict[str, str]:
    """Return the HTML of jobs and runs, by its place on the page."""
    return {
        "strip": job_list(desk),
        "erase": erase.progress_html(desk, erase.latest_job(desk, "erase")),
        "attack": attack.progress_html(desk, erase.latest_job(desk, "attack")),
        "offer": compare.invitation(desk),
        "table": results.runs_table(desk),
        "measured": results.progress_html(desk, erase.latest_job(desk, "measure")),
    }


def menu_choices(desk: Desk) -> dict[str, list]:
    """Return the choices of the menus.

    They are the jobs to cancel, the runs that generate images, the runs to resume, and the runs on
    labelled data.
    """
    library = desk.library
    return {
        "active": cancellable_jobs(desk.jobs.all()),
        "drawn": library.finished_runs(),
        "left": library.unfinished_runs(),
        "images": library.finished_runs(labelled.TARGETS),
    }


def changes(
    gr: Any,
    desk: Desk,
    previous_state: dict[str, Any],
    chosen_runs: Sequence[str],
    *,
    chosen_job: Any = None,
    chosen_unfinished_run: Any = None,
) -> list[Any]:
    """Return the updates of the components, in the order of `outputs`.

    Args:
        gr: The module gradio.
        desk: The state that all tabs share.
        previous_state: The state that this browser already has.
        chosen_runs: The runs that the user compares.
        chosen_job: The job that the user chose in the menu for cancelling.
        chosen_unfinished_run: The run that the user chose in the menu for resuming.
    """
    messages, now = texts(desk), menu_choices(desk)
    state = {**{name: hash(text) for name, text in messages.items()}, **now}
    is_changed = {name: state[name] != previous_state.get(name) for name in state}
    active, image_runs = now["active"], now["drawn"]

    def update(names: Sequence[str], make: Callable[[], Any]) -> Any:
        return make() if any(is_changed[name] for name in names) else gr.skip()

    def menu(name: str) -> Any:  # a selection of the user is not changed
        return gr.Dropdown(
            now[name],
            **({} if previous_state.get(name) else {"value": next(iter(now[name]), None)}),
        )

    def choose(choices: Sequence[Any], values: Sequence[str], chosen: Any) -> Any:
        # a selection of the user is kept while it is there, since the next click acts on it
        value = chosen if chosen in values else next(iter(values), None)
        return gr.Dropdown(choices, value=value)

    new = [name for name in image_runs if name not in previous_state.get("drawn", image_runs)]
    selection = [name for name in chosen_runs or [] if name in image_runs]
    return [
        *(text if is_changed[name] else gr.skip() for name, text in messages.items()),
        state,
        update(["active"], lambda: gr.Row(visible=bool(active))),
        update(["active"], lambda: choose(active, [n for _, n in active], chosen_job)),
        update(["active"], lambda: gr.Timer(ACTIVE_INTERVAL if active else IDLE_INTERVAL)),
        # at the start the address of the page has the selection, see page._open
        update(
            ["drawn"] if previous_state else [],
            lambda: gr.CheckboxGroup(image_runs, value=(new + selection)[: safety.COLUMNS]),
        ),
        update(["drawn"], lambda: menu("drawn")),
        update(["drawn"], lambda: menu("drawn")),
        update(["left"], lambda: choose(now["left"], now["left"], chosen_unfinished_run)),
        update(["drawn"], lambda: gr.Dropdown(erase.models(desk))),
        update(["images"], lambda: menu("images")),
        update(["drawn", "active"], lambda: gr.Button(visible=not image_runs and not active)),
    ]


def add_timer(
    gr: Any,
    desk: Desk,
    parts: dict[str, Any],
    jobs: Any,
    row: Any,
    cancel_menu: Any,
    events: Sequence[Any],
) -> None:
    """Connect the timer. After an event (a new or cancelled job) the page updates at once."""
    clock, last = gr.Timer(ACTIVE_INTERVAL), gr.State({})
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
    outputs = [*components, last, row, cancel_menu, clock, *menus]

    def update_page(
        sent: dict[str, Any], chosen_runs: list[str], job: Any, unfinished_run: Any
    ) -> list[Any]:
        try:
            return changes(
                gr,
                desk,
                sent,
                chosen_runs,
                chosen_job=job,
                chosen_unfinished_run=unfinished_run,
            )
        except Exception as error:  # a file that is being written; the next update reads it again
            error_text(error)
            return [gr.skip()] * len(outputs)

    for event in (clock.tick, *(event.then for event in events)):
        event(
            update_page,
            [last, parts["Compare"]["runs"], cancel_menu, parts["Erase"]["left"]],
            outputs,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
