"""The tab Compare: images of one prompt and the same seeds before and after, at any strength."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlencode

from concept_eraser.demo import image_html, presets, safety
from concept_eraser.demo.context import Desk, alert, error_text, quiet
from concept_eraser.demo.state import BUNDLED, ImageSettings, Options
from concept_eraser.utils.errors import UserError

if TYPE_CHECKING:
    from concept_eraser.evaluation.never_learned import NeverLearned

START = "a red star"
LADDER = (0.25, 0.5, 0.75, 1.0)
# characters of a setting in a link that are read: the names of all runs, of escaped characters
LINK_TEXT = safety.COLUMNS * (3 * safety.NAME + 1)
ShareProgress = Callable[[float, str], None]  # progress between 0 and 1, and its description


@dataclass(frozen=True)
class ComparisonSettings:
    """All settings of Compare. A link to the page holds the same."""

    prompt: str = START
    runs: tuple[str, ...] = ()
    strength: float = 1.0
    steps: int = 12
    guidance: float = 5.0
    seeds: int = 4
    first: int = 0
    judge: str = "auto"

    def check(self) -> ComparisonSettings:
        """Return checked settings. Raises UserError if a value is outside its limits."""
        if len(self.runs) > safety.COLUMNS:
            raise safety.UserError(
                f"{len(self.runs)} runs; at most {safety.COLUMNS} are compared at once"
            )
        runs = tuple(str(run)[: safety.NAME] for run in self.runs)
        return ComparisonSettings(
            prompt=safety.prompt(self.prompt),
            runs=runs,
            strength=safety.number("strength", self.strength),
            steps=safety.whole_number("sampler steps", self.steps),
            guidance=safety.number("guidance", self.guidance),
            seeds=safety.whole_number("number of seeds", self.seeds),
            first=safety.whole_number("first seed", self.first),
            judge=safety.require_choice("judge", self.judge, image_html.JUDGES),
        )

    def query(self) -> str:
        """Return the settings as a link has them, where the names of runs are between commas."""
        names = (run.replace("%", "%25").replace(",", "%2C") for run in self.runs)
        return urlencode({**asdict(self), "runs": ",".join(names)})

    @classmethod
    def read(cls, query: Mapping[str, str], run_names: list[str]) -> ComparisonSettings:
        """Read the settings in a link.

        Invalid values are replaced by their defaults. Unknown runs are left out.
        """
        values: dict[str, Any] = {
            key: query[key][:LINK_TEXT] for key in asdict(cls()) if key in query
        }
        for key, kind in (
            ("strength", float),
            ("guidance", float),
            ("steps", int),
            ("seeds", int),
            ("first", int),
        ):
            try:
                values |= {key: kind(values[key])} if key in values else {}
            except ValueError:
                values.pop(key)
        is_without_runs = values.get("runs") == ""
        names = map(unquote, str(values.pop("runs", "")).split(","))
        runs = tuple(name for name in names if name in run_names)[: safety.COLUMNS]
        for key in list(values):
            try:
                cls(**{key: values[key]}).check()
            except safety.UserError:
                values.pop(key)
        return cls(**values, runs=runs if runs or is_without_runs else tuple(run_names[:1]))


@dataclass(frozen=True)
class ColumnRequest:
    """One column to generate: a run at a strength, a control, or a base model without these."""

    title: str
    run: str | None
    base: str
    strength: float = 1.0
    options: Options = ()
    control: str | None = None


def column_requests(
    desk: Desk, settings: ComparisonSettings, ladder: bool
) -> tuple[list[ColumnRequest], list[str]]:
    """List the columns: each base once, followed by its runs; or one run at rising strengths.

    The controls of the base stand behind its runs. Returns the columns, and why a base has none.
    """
    library = desk.library
    reasons: list[str] = []
    runs = settings.runs[:1] if ladder else settings.runs
    for name in runs:
        library.load_change(name)  # raise errors before any image is generated
    columns: list[ColumnRequest] = []
    origins = {name: (library.base_of(name), library.options_of(name)) for name in runs}
    bases = dict.fromkeys(list(origins.values()) or [(BUNDLED, ())])
    for base, options in bases:
        title = " ".join([base, *(f"{key}={value:g}" for key, value in options)])
        columns.append(
            ColumnRequest(
                "before" if len(bases) == 1 else f"before: {title}", None, base, options=options
            )
        )
        for name in [name for name in runs if origins[name] == (base, options)]:
            if ladder:
                columns += [
                    ColumnRequest(
                        title=f"{name} at {s:g}", run=name, base=base, strength=s, options=options
                    )
                    for s in LADDER
                ]
            else:
                at = "" if settings.strength == 1 else f" at {settings.strength:g}"
                columns.append(
                    ColumnRequest(
                        title=name + at,
                        run=name,
                        base=base,
                        strength=settings.strength,
                        options=options,
                    )
                )
        concepts = _concepts(desk, [name for name in runs if origins[name] == (base, options)])
        controls, unfit = _controls(desk, base, concepts)
        columns += [
            ColumnRequest(title, None, base, options=options, control=control)
            for title, control in controls
        ]
        reasons += [] if controls else unfit
    return columns, list(dict.fromkeys(reasons))


def _concepts(desk: Desk, runs: Sequence[str]) -> list[tuple[str, str]]:
    """List the attribute and value of the concepts that runs erased, as far as they are known."""
    return [
        concept
        for name in runs
        if (recipe := desk.library.recipe(name)) and (concept := presets.concept_of(recipe))
    ]


def _controls(
    desk: Desk, base: str, concepts: Sequence[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[str]]:
    """List the controls that never learned one of the concepts, and why the others are left out.

    A control with a record is named by what it never learned.
    """
    controls: list[tuple[str, str]] = []
    titles: list[str] = []
    reasons = []
    for source in desk.library.controls:
        try:
            control = desk.library.never_learned(base, source)
            _require_without_one_of(control, concepts)
        except UserError as error:
            reasons.append(str(error))
            continue
        without = control.record.get("without", {}).values()
        values = [value for some in without for value in some]
        title = " ".join(["never learned", " or ".join(values)]).strip()
        titles.append(title)
        number = titles.count(title)
        controls.append((title if number == 1 else f"{title} ({number})", source))
    return controls, reasons


def _require_without_one_of(control: NeverLearned, concepts: Sequence[tuple[str, str]]) -> None:
    """Raise UserError if the record says that a control was trained on each of the concepts."""
    errors = []
    for attribute, value in concepts:
        try:
            control.require_without(attribute, value)
            return
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def draw(
    desk: Desk,
    settings: ComparisonSettings,
    tell_progress: ShareProgress | None = None,
    ladder: bool = False,
) -> str:
    """Generate the comparison as HTML.

    Raises UserError for bad settings, and Interrupted if it was stopped.
    """
    settings = settings.check()
    desk.library.start()
    requests, reasons = column_requests(desk, settings, ladder)
    seeds = range(settings.first, settings.first + settings.seeds)
    image_settings = [
        ImageSettings(settings.prompt, seed, settings.steps, settings.guidance) for seed in seeds
    ]
    names = dict.fromkeys(column.run for column in requests if column.run)
    concepts = _concepts(desk, list(names))
    is_sensitive = any(
        presets.is_run_sensitive(desk.library.recipe(name), desk.library.folder(name))
        for name in names
    )
    columns = []
    for k, column in enumerate(requests):

        def tell(images_done: int, total: int, k: int = k, column: ColumnRequest = column) -> None:
            if tell_progress:
                tell_progress(
                    (k + images_done / total) / len(requests),
                    f"generating {column.title}: step {images_done} of {total}",
                )

        images = desk.library.draw(
            name=column.run,
            image_settings=image_settings,
            strength=column.strength,
            tell=tell,
            base=column.base,
            options=column.options,
            control=column.control,
        )
        facts = {
            "model": column.run or column.control or column.base,
            "base": column.base,
            "strength": column.strength if column.run else 0,
            "steps": settings.steps,
            "guidance": settings.guidance,
            "prompt": settings.prompt,
        }
        judgements = image_html.judge_images(
            images, settings.judge, concepts, base=column.base, sensitive=is_sensitive
        )
        columns.append(
            image_html.ImageColumn(
                column.title,
                images,
                judgements=judgements,
                settings=[{**facts, "seed": s} for s in seeds],
                before=column.run is None and column.control is None,
            )
        )
    notes = "".join(quiet(f"without a never-learned model: {reason}") for reason in reasons)
    return (
        _summary(columns, concepts)
        + notes
        + image_html.comparison(columns, [str(seed) for seed in seeds])
    )


def _summary(columns: list[image_html.ImageColumn], concepts: Sequence[tuple[str, str]]) -> str:
    """Return one line that counts the images with the concept, by model.

    If the runs erased several concepts, an image counts with any of them, and the line names them.
    """
    values = list(dict.fromkeys(value for _, value in concepts))
    concept = "the concept" if len(values) == 1 else escape(" or ".join(values))
    parts = [
        f"<b>{escape(c.title)}</b> {sum(bool(s.shows) for s in c.judgements)} "
        f"of {len(c.judgements)}"
        for c in columns
        if c.judgements and c.judgements[0].shows is not None
    ]
    return (
        f'<p class="ce-summary" role="status">Shows {concept}: {" · ".join(parts)}</p>'
        if parts
        else ""
    )


def preset(desk: Desk, kind: str, runs: list[str], current_prompt: str) -> str:
    """Return the next prompt of a kind for the first run. Raises UserError if there is none."""
    safety.require_choice("preset", kind, presets.KINDS)
    recipe = desk.library.recipe(runs[0]) if runs else None
    texts = (
        presets.offers(recipe).get(kind, [])
        if recipe
        else {"retain": ["a blue house", "a green tree"]}.get(kind, [START])
    )
    if not texts:
        raise safety.UserError(f"this run has no {kind} prompts; type one of your own")
    return (
        texts[(texts.index(current_prompt) + 1) % len(texts)]
        if current_prompt in texts
        else texts[0]
    )


def invitation(desk: Desk) -> str:
    """Return the text of Compare while there is no finished run."""
    if desk.library.finished_runs():
        return ""
    if any(job.kind == "erase" and job.active for job in desk.jobs.all()):
        return (
            '<p class="ce-notice">A run is in training. Its progress is at the top and its '
            "losses are under Erase. Its images appear here when it is done.</p>"
        )
    return (
        '<p class="ce-notice">Nothing has been erased yet, so there are only images of the '
        "original. Make the bundled model forget the star: this takes about a minute, and the "
        "page shows the progress and the result.</p>"
    )


def tab(gr: Any, desk: Desk) -> dict[str, Any]:
    """Build the tab. Returns the components that other tabs and the timer update, by name."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            offer = gr.HTML(elem_id="offer")
            first = gr.Button(
                "Erase the star now", variant="primary", visible=False, elem_id="first-run"
            )
            prompt = gr.Textbox(
                START,
                label="Prompt",
                lines=2,
                max_lines=4,
                elem_id="prompt",
                info=f"at most {safety.PROMPT} characters; Enter generates",
                submit_btn=False,
            )
            with gr.Row(elem_classes="ce-presets"):
                buttons = {
                    kind: gr.Button(
                        kind.capitalize(), size="sm", min_width=60, elem_id=f"preset-{kind}"
                    )
                    for kind in presets.KINDS
                }
            runs = gr.CheckboxGroup([], label="Erased models to compare", elem_id="runs")
            # the library checks the names, because Gradio knows only the runs of its start
            runs.preprocess = list
            strength = gr.Slider(
                0,
                1,
                1.0,
                step=0.05,
                label="Strength of the erasure",
                info="0 is the original, bit for bit",
                elem_id="strength",
            )
            go = gr.Button("Generate", variant="primary", elem_id="draw")
            with gr.Row():
                ladder = gr.Button("Every strength", size="sm", elem_id="ladder", min_width=110)
                stop = gr.Button("Stop generating", size="sm", elem_id="stop", min_width=110)
            with gr.Accordion("Sampler, seeds and judge", open=False):
                steps = gr.Slider(
                    *safety.LIMITS["sampler steps"],
                    12,
                    step=1,
                    label="Sampler steps",
                    elem_id="steps",
                )
                guidance = gr.Slider(
                    *safety.LIMITS["guidance"], 5.0, step=0.5, label="Guidance", elem_id="guidance"
                )
                seeds = gr.Slider(
                    *safety.LIMITS["number of seeds"],
                    4,
                    step=1,
                    label="Images of each model",
                    elem_id="seeds",
                )
                seed = gr.Number(0, label="First seed", precision=0, elem_id="first-seed")
                judge = gr.Dropdown(
                    list(image_html.JUDGES),
                    value="auto",
                    label="Captions by",
                    elem_id="judge",
                    info=(
                        "auto: the bundled judge for 64x64 images of the bundled model, "
                        "NudeNet for all others; images of a sensitive run are blurred with any"
                    ),
                )
            with gr.Accordion("Free memory", open=False):
                drop = gr.Button(
                    "Remove the selected runs from this page", size="sm", elem_id="drop"
                )
            link = gr.HTML(elem_id="link")
        with gr.Column(scale=5, min_width=300):
            message = gr.HTML(elem_id="compare-said")
            view = gr.HTML(elem_id="shown", min_height=320)
    fields = [prompt, runs, strength, steps, guidance, seeds, seed, judge]
    _wire(
        gr,
        desk,
        fields=fields,
        gallery=view,
        message=message,
        link=link,
        go=go,
        ladder=ladder,
        stop=stop,
        buttons=buttons,
        drop=drop,
    )
    return {
        "fields": fields,
        "runs": runs,
        "offer": offer,
        "first": first,
        "shown": view,
        "said": message,
        "link": link,
        "go": go,
    }


def _wire(
    gr: Any,
    desk: Desk,
    fields: list,
    gallery: Any,
    message: Any,
    link: Any,
    go: Any,
    ladder: Any,
    stop: Any,
    buttons: Mapping[str, Any],
    drop: Any,
) -> None:
    prompt, runs, strength = fields[:3]
    drawing = {
        "concurrency_id": "draw",
        "concurrency_limit": 1,
        "outputs": [gallery, message, link],
    }

    def draw_images(*values: Any, progress: Any = gr.Progress()) -> tuple[Any, str, Any]:
        return answer(gr, desk, values=values, ladder=False, progress=progress)

    def draw_ladder(*values: Any, progress: Any = gr.Progress()) -> tuple[Any, str, Any]:
        return answer(gr, desk, values=values, ladder=True, progress=progress)

    def choose(kind: str) -> Callable:
        def pick(now: str, names: list[str]) -> tuple[Any, str]:
            try:
                return preset(desk, kind, names, now), ""
            except Exception as error:
                return gr.skip(), alert(error_text(error))

        return pick

    def remove_runs(names: list[str]) -> Any:
        for name in names[: safety.LISTED]:
            with suppress(UserError):  # its folder was removed
                desk.library.drop(name)
        return gr.CheckboxGroup(desk.library.finished_runs(), value=[])

    gr.on(
        [go.click, prompt.submit, strength.release], draw_images, fields, api_name="draw", **drawing
    )
    ladder.click(draw_ladder, fields, api_name="ladder", **drawing)
    stop.click(desk.library.stop, queue=False, api_visibility="private")
    drop.click(remove_runs, runs, runs, api_visibility="private")
    for kind, button in buttons.items():
        button.click(
            choose(kind), [prompt, runs], [prompt, message], queue=False, api_visibility="private"
        ).then(draw_images, fields, api_visibility="private", **drawing)


def answer(gr: Any, desk: Desk, values: Any, ladder: bool, progress: Any) -> tuple[Any, str, Any]:
    """Return the images, an error message or "", and the link to the settings."""
    try:
        settings = ComparisonSettings(values[0], tuple(values[1] or ()), *values[2:])
        html = draw(desk, settings, lambda share, text: progress(share, desc=text), ladder)
    except Exception as error:
        return gr.skip(), alert(error_text(error)), gr.skip()
    query = escape(settings.check().query())
    return (
        html,
        "",
        f'<a class="ce-link" href="?{query}" data-query="?{query}">Link to these settings</a>',
    )
