"""concept-eraser attack"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.cli.next_step import permissions
from concept_eraser.utils import distributed, limits
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import UserError, quote

DEFAULT = "unlearn_diff"


def attack(
    model: Annotated[
        str,
        typer.Argument(
            help=(
                "what to attack: a run folder, a diffusers folder, a hub id; or a LoRA, "
                "denoiser or text encoder, with --before"
            )
        ),
    ],
    name: Annotated[
        Optional[str],
        typer.Option(
            "--attack", "-a", help="see `concept-eraser list attacks`", show_default=DEFAULT
        ),
    ] = None,
    suite: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "evaluation suite: its concept, judge, sampler and prompts (default: the "
                "suite.yaml in the run folder, or the suite with the name of its forget set)"
            )
        ),
    ] = None,
    group: Annotated[str, typer.Option(help="the suite's group of prompts to attack")] = "direct",
    before: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "the original model, which generates the concept (default: the model that the "
                "run's recipe names; without a recipe tiny-sd, for models of its architecture only)"
            )
        ),
    ] = None,
    n: Annotated[int, typer.Option("-n", min=2, max=limits.IMAGES, help="how many prompts")] = 20,
    batch: Annotated[
        int, typer.Option(min=1, max=limits.BATCH, help="prompts attacked at once")
    ] = 16,
    seed: Annotated[
        int, typer.Option(min=0, max=limits.SEED, help="seed of the attack's own randomness")
    ] = 0,
    hide: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "replace the concept's word in the prompts by this word; tests an attack on an "
                "unprotected model"
            )
        ),
    ] = None,
    word: Annotated[
        Optional[str],
        typer.Option(
            help="the word for the concept in the prompts, if it is not the suite's value"
        ),
    ] = None,
    settings: Annotated[
        Optional[list[str]],
        typer.Option(
            "--set",
            help=(
                "an option of the attack, key=value; may be given several times; a list has commas "
                "between its values, e.g. strengths=0.9,0.5"
            ),
        ),
    ] = None,
    cascade: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "several attacks in place of one, from cheap to strong, joined by commas, or "
                "`default`; each attacks the prompts that none before has broken; an option is set "
                "by --set ATTACK.key=value"
            )
        ),
    ] = None,
    each_family: Annotated[
        bool,
        typer.Option(
            "--each-family", help="with --cascade: every family of attacks begins with all prompts"
        ),
    ] = False,
    guard: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "sample under a safeguard, kind:text: negative:, sld-weak:, sld-medium:, "
                "sld-strong:, sld-max:, adavd:, adavd-adaptive:, safree:, safree-validated:, "
                "semantic-surgery:, or spm-gate:, spm-gate-clip: and spm-gate-tokens: with "
                "CONCEPT@RUN; the run's report and model card leave the result out"
            )
        ),
    ] = None,
    control: Annotated[
        Optional[list[str]],
        typer.Option(
            help=(
                "a model that never learned the concept; it is attacked by the same protocol, and "
                "the result shows how much more the attack recovers from the victim; may be given "
                "several times, for several training seeds"
            )
        ),
    ] = None,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output",
            "-o",
            help=(
                "folder of attack.json, attack.csv.xz, attack.png, images/ and attempts.jsonl "
                "(default: attacks/<attack> in the run folder, or here; with --guard "
                "attacks/<attack>-<kind>)"
            ),
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="also load weights stored as pickles, which can execute code"
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Attack a model with adversarial prompts (or by relearning) and count how often the concept
    returns.

    The same command continues an attack that was interrupted.

    [bold]Examples[/bold]

      concept-eraser attack runs/tiny_star_munba

      concept-eraser attack ./somebodys-erased-sd --before tiny-sd --suite tiny_star -a p4d-k --set
      steps=300 -n 40

      concept-eraser attack esd-star.safetensors --before tiny-sd --suite tiny_star -a soft_prompt

      concept-eraser attack tiny-sd --suite tiny_star --hide shape   (a control: the original model)

      concept-eraser attack runs/tiny_star_munba --cascade random_tokens,unlearn_diff,soft_prompt
      --set soft_prompt.steps=1000 -n 48

      concept-eraser attack runs/heart -a soft_prompt --control tiny-sd-without-heart
    """
    from concept_eraser import api
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.cli.threads import use_idle_cores
    from concept_eraser.storage import output_folder

    # files go into run folders only, not into other people's model folders
    run_folder = Path(model) if (Path(model) / "recipe.yaml").is_file() else Path()
    chosen = name or ("cascade" if cascade else DEFAULT)
    if cascade and name:
        raise UserError("give either --attack or --cascade")
    folder = output or run_folder / "attacks" / (
        chosen if guard is None else f"{chosen}-{guard.partition(':')[0]}"
    )
    if output is None and run_folder != Path():
        output_folder.require_claimable(folder, "attack", inside=run_folder)
    use_idle_cores()
    with bars(quiet) as progress:
        result = api.attack(
            model,
            name or DEFAULT,
            suite,
            group=group,
            before=before,
            n=n,
            batch=batch,
            seed=seed,
            hide=hide,
            word=word,
            options={} if cascade else _options(settings or []),
            cascade=_entries(cascade, settings or []) if cascade else None,
            each_family=each_family,
            guard=guard,
            control=control or None,
            output=folder,
            allow_pickle=allow_pickle,
            progress=progress,
        )
    if distributed.is_first():
        if cascade:
            _show_stages(result)
        summarise(result)
        _show_controls(result)
        typer.echo(f"numbers: {folder / 'attack.json'}")
        if (sheet := folder / "attack.png").is_file():
            typer.echo(f"images:  {sheet} (original, erased model, under the attack)")
        # the run's report leaves out attacks under a safeguard
        has_report = run_folder != Path() and (run_folder / "evaluation.json").is_file()
        if has_report and folder.is_relative_to(run_folder) and guard is None:
            permitted = permissions(allow_pickle=allow_pickle)
            typer.echo(f"report:  {shell_command('report', run_folder, *permitted)}")


def _options(settings: list[str]) -> dict[str, Any]:
    options = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"cannot read --set {quote(text)}; write key=value, e.g. k=3")
        options[key.strip()] = value.strip()
    return options


def _entries(cascade: str, settings: list[str]) -> list[dict[str, Any]]:
    """Return the attacks of a cascade, with the options that `--set` gives them.

    Raises UserError for an option without its attack, or of an attack that is not in the cascade.
    """
    from concept_eraser.evaluation.attacks import cascade as cascades

    names = list(cascades.DEFAULT) if cascade == "default" else cascade.split(",")
    entries: dict[str, dict[str, Any]] = {name.strip(): {} for name in names}
    if len(entries) < len(names):
        raise UserError(f"--cascade has an attack twice: {quote(cascade)}")
    for key, value in _options(settings).items():
        name, dot, option = key.rpartition(".")
        if not dot or name not in entries:
            raise UserError(
                f"cannot use --set {quote(key)} in a cascade; write ATTACK.{option or 'key'}=value "
                f"with one of {', '.join(entries)}"
            )
        entries[name][option] = value
    return [{"name": name, **options} for name, options in entries.items()]


def _show_stages(results: Any) -> None:
    """Print what each attack of a cascade attacked and broke, and the families."""
    typer.echo("attack                     family                         attacked  broken  new")
    for stage in results.stages:
        typer.echo(
            f"{stage.attack:<26} {stage.family:<30} {stage.attacked:>8}  {stage.broken:>6}  "
            f"{stage.new:>3}"
        )
    for family, summary in results.families().items():
        if summary["rate"] is not None:
            rate = summary["rate"]
            typer.echo(
                f"{family:<38} {100 * rate['value']:5.1f} % "
                f"[{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]  n = {rate['n']}"
            )


def _show_controls(results: Any) -> None:
    """Print the excess recovery and the relearning savings against each control."""
    from concept_eraser.evaluation.attacks.excess import describe_savings

    for control in results.controls:
        typer.echo(f"control: {control.model}")
        rows = {"excess recovery": control.excess.get("asr")}
        rows |= {f"excess by {family}": excess for family, excess in control.families.items()}
        for title, excess in rows.items():
            if excess is None:
                continue
            difference, rate = excess["difference"], excess["control"]["value"]
            typer.echo(
                f"{title:<38} {100 * difference['value']:+5.1f} points "
                f"[{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}]  "
                f"n = {difference['n']}; control {100 * rate:.1f} %"
            )
        for name, savings in control.savings.items():
            typer.echo(f"relearning savings, {name}: {describe_savings(savings)}")
    if mean := results.excess_over_controls():
        typer.echo(
            f"mean excess over {mean['seeds']} controls: {100 * mean['value']:+.1f} points "
            f"[{100 * mean['low']:+.1f}, {100 * mean['high']:+.1f}]"
        )


def summarise(results: Any) -> None:
    """Print the rates with their intervals, the cost, and the first successful prompts."""
    rates = results.rates()
    typer.echo(f"family: {results.family}")
    meaning = {
        "pre": "pre-ASR (success without the attack)",
        "attacked": "success of the attack on the others",
        "asr": "post-ASR (both)",
    }
    for key in ("pre", "attacked", "asr"):
        if key in rates:
            rate = rates[key]
            typer.echo(
                f"{meaning[key]:<38} {100 * rate['value']:5.1f} % "
                f"[{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]  n = {rate['n']}"
            )
    if results.protocol["left_out"]:
        typer.echo(
            f"left out: {results.protocol['left_out']} prompts whose image by the "
            "original does not show the concept"
        )
    if concept_rates := results.concept_rates():
        typer.echo(
            "concept rate after each round: "
            + ", ".join(f"{100 * rate:.0f} %" for rate in concept_rates)
        )
    typer.echo(
        "cost: "
        + (", ".join(f"{value:g} {unit}" for unit, value in results.cost.items()) or "none")
        + f"; {results.seconds:.0f} s"
    )
    for attempt in [a for a in results.attempts if a.success and not a.pre][:5]:
        no_text = "(no text: an embedding, other weights or another way of sampling)"
        text = no_text if attempt.text is None else attempt.text
        typer.echo(f"  success in round {attempt.round}: {text}")
