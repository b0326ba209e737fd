"""Every command and every Python block of the README and the guides runs, in the page's order.

A page runs in one scratch folder with the stand-ins of tests/docs/stand_ins.py. Each command gets
few steps and images. The tutorials run in test_tutorials.py, some Python blocks in other files
(ELSEWHERE). The examples of docstrings run at the end of this file.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

import concept_eraser
from concept_eraser.evaluation import suite as suites
from concept_eraser.utils import resources
from tests.conftest import ROOT
from tests.docs import stand_ins
from tests.docs.stand_ins import FEW, SD, STEPS
from tests.docs.test_docs import run_block
from tests.docs.test_tutorials import BLOCKS, parse_command
from tests.fake_hub import TOKEN, Hub

DOCS = ROOT / "docs"
WALKED = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("index", "measuring", "demo", "scale")),
    *sorted((DOCS / "how_to").glob("*.md")),
    *sorted((DOCS / "explanation").glob("*.md")),
]
# Python blocks that another file executes
ELSEWHERE = {
    "README": "test_readme.py",
    "targets": "test_docs.py",
    "plugins": "test_docs.py",
    "explanation/attack_success": "test_tutorials.py",
    "explanation/two_gradients": "test_tutorials.py",
    **{
        f"tutorials/{path.stem}": "test_tutorials.py"
        for path in (DOCS / "tutorials").glob("*.md")
        if path.stem != "index"
    },
}


class Exemption(NamedTuple):
    """What happens to a command instead of its execution, and why.

    instead: "nothing", "parse", "run without the launcher", or a part of the error that the
        command ends with.
    """

    instead: str
    reason: str

    @property
    def is_error(self) -> bool:
        return self.instead not in ("nothing", "parse", "run without the launcher")


NOTHING_TO_ATTACK = Exemption(
    "an attack needs prompts whose image by the original shows the concept",
    "the original's weights are random; README's attacks run to their end",
)
LONG_ESTIMATE = Exemption(
    "parse", "takes 10 seconds and more; tests/runs/test_dry_run.py makes the dry run of recipes"
)
NO_CONTROL = Exemption(
    "parse",
    "a control takes an hour to train; tests/evaluation/test_never_learned.py compares with one",
)
# The beginning of a command. An entry that no page needs fails a test.
EXEMPTIONS = {
    "make quickstart": Exemption("nothing", "installs; tests/cli has the command quickstart"),
    "make test": Exemption("nothing", "is this suite"),
    "pip install": Exemption("nothing", "installs packages"),
    "tensorboard": Exemption("nothing", "is a server of another package"),
    "concept-eraser demo": Exemption("parse", "serves until it ends; tests/demo start it"),
    "concept-eraser erase tiny_star_munba training.tracker=[tensorboard, wandb]": Exemption(
        "parse", "starts a service of wandb; tests/training/test_trackers.py trains with it"
    ),
    "concept-eraser batch": Exemption(
        "parse", "trains every row of a table; tests/runs/test_job_table.py does"
    ),
    "concept-eraser erase --leco config.yaml": Exemption(
        "parse", "a file of another program; tests/recipes/test_leco.py trains one"
    ),
    "concept-eraser erase --leco slider.toml": Exemption(
        "parse", "tests/recipes/test_leco.py reads one, and trains its loss"
    ),
    "accelerate launch": Exemption(
        "run without the launcher",
        "needs several GPUs; tests/training/test_two_processes.py launches two processes",
    ),
    "torchrun": Exemption("run without the launcher", "needs several GPUs"),
    "concept-eraser distance after reference --features inception": Exemption(
        "inception-2015-12-05.pt",
        "Inception's weights are absent, and the command says where to put them",
    ),
    "concept-eraser attack esd-unet.safetensors": NOTHING_TO_ATTACK,
    "concept-eraser attack runs/mine --suite nudity": NOTHING_TO_ATTACK,
    "concept-eraser attack runs/nudity": NOTHING_TO_ATTACK,
    "concept-eraser attack runs/tiny_star_munba --cascade": NOTHING_TO_ATTACK,
    "concept-eraser evaluate runs/two --suite": Exemption("the CLIP weights", "they are absent"),
    "concept-eraser attack runs/tiny_star_munba -a soft_prompt --control": NO_CONTROL,
    "concept-eraser evaluate runs/tiny_star_munba --control": NO_CONTROL,
    "concept-eraser erase sd3_nudity_munba": LONG_ESTIMATE,
    "concept-eraser erase flux_vangogh_esd --memory 32gb --dry-run": LONG_ESTIMATE,
    "concept-eraser erase sdxl_vangogh_esd": LONG_ESTIMATE,
    "export CONCEPT_ERASER_CACHE": Exemption("nothing", "the fixture `cache` sets the variable"),
    "python -m concept_eraser.tiny.build": Exemption(
        "nothing", "takes an hour; tests/tiny/test_control.py trains a shortened one"
    ),
    "python -m studies.leaderboard": Exemption("nothing", "takes hours; tests/studies run it"),
    "python -m studies.render_results": Exemption("nothing", "writes into the checkout"),
}
# What replaces models that are not on this machine
REPLACEMENTS = {"owner/name": "./erased-sd"}
SMALL_LORA = ["trainable.select=cross_attention", "trainable.lora.rank=2"]
SMALL_FLUX = ["model=./flux", "model_options.size=16"]
RECIPE_OVERRIDES = {
    "sd14_nudity_munba": [f"model=./{SD}"],
    "mine.yaml": [f"model=./{SD}"],
    "flux_vangogh_esd": SMALL_FLUX,
    "flux_nudity_munba": SMALL_FLUX,
    "tiny_star_munba": [f"model=./{SD}"],
}


def name_of(path: Path) -> str:
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).with_suffix("").as_posix()


@dataclass
class Page:
    """A page under way: its folder, and what its commands and blocks left."""

    path: Path
    folder: Path
    cli: Any
    hub: Callable[[list[str]], str]
    outputs: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})


def commands_of(path: Path) -> list[list[str]]:
    return [
        words
        for kind, block in BLOCKS.findall(path.read_text(encoding="utf-8"))
        for words in commands_in(kind, block)
    ]


def commands_in(kind: str, block: str) -> Iterator[list[str]]:
    """The commands of a shell block, in words; of a block of text, those that it shows."""
    if kind not in ("sh", "text"):
        return
    for line in block.replace("\\\n", " ").splitlines():
        if kind == "text" and not re.match(r"(concept-eraser|pip|python|export|make) ", line):
            continue
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                yield words
                words = []


def exemption_of(words: list[str]) -> Exemption | None:
    line = " ".join(without_variables(words))
    return next((one for start, one in EXEMPTIONS.items() if line.startswith(start)), None)


def without_variables(words: list[str]) -> list[str]:
    """The words of a command after the environment variables before it."""
    if words[0] == "export":
        return words
    first = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return words[first:]


def without_launcher(words: list[str]) -> list[str]:
    """The words of a command without accelerate or torchrun."""
    words = without_variables(words)
    if words[0] not in ("accelerate", "torchrun"):
        return words
    return ["concept-eraser", *words[words.index("concept_eraser") + 1 :]]


# --- few steps and images ------------------------------------------------------------------------


def few_overrides(recipe: str | None, *, dry_run: bool = False) -> list[str]:
    """Overrides for few steps and images, and for a model that is on this machine."""
    if recipe == "tiny_five_uce":  # closed form: there are no steps
        return [f"model=./{SD}"]
    few = STEPS if recipe and recipe.endswith("_esd") else FEW  # ESD needs no images
    return [*few, *(RECIPE_OVERRIDES.get(recipe or "", []) if not dry_run else [])]


def recipe_in(items: list[str]) -> str | None:
    """The recipe among the words of `erase`; None if they are concepts and overrides."""
    known = resources.names("pipelines")
    return next((item for item in items if item in known or item.endswith(".yaml")), None)


def few_words(verb: str, values: dict[str, Any]) -> list[str]:
    """What a command gets in addition; a later option replaces an earlier one."""
    if verb == "erase":
        if values["leco"]:  # on latents that are sampled in training
            return [*STEPS, "-q"]
        items = [item for item in values["items"] or [] if "=" not in item]
        recipe = recipe_in(items)
        words = [*few_overrides(recipe, dry_run=values["dry_run"]), "-q"]
        if items and recipe is None:
            words += [*SMALL_LORA, "--images", "2", "--no-evaluate"]
        elif recipe is None and values["model"] is None:
            words.append(f"model=./{SD}")
        return words
    few = {"evaluate": ["-n", "2"], "attack": ["-n", "2"], "generate": ["-n", "2", "--steps", "2"]}
    return [*few[verb], "-q"] if verb in few else []


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten `erase`, `evaluate` and `attack` of Python in the same way."""
    erase, evaluate, attack = concept_eraser.erase, concept_eraser.evaluate, concept_eraser.attack

    def short_erase(recipe: Any = None, **keywords: Any) -> concept_eraser.Run:
        if isinstance(recipe, dict):  # of a configuration of LECO, without images
            return erase(recipe, overrides=STEPS, **keywords)
        names = [recipe] if isinstance(recipe, str) else list(recipe or [])
        recipe_name = recipe_in(names)
        if keywords.get("target") in ("clip", "classifier"):
            return erase(recipe, **keywords)
        overrides = [*keywords.pop("overrides", ()), *few_overrides(recipe_name)]
        if "model_options" in keywords:
            overrides.append("model_options.size=16")
        if names and recipe_name is None:
            overrides += SMALL_LORA
            keywords["images"] = 2
        return erase(recipe, overrides=overrides, **keywords)

    def short_evaluate(*arguments: Any, **keywords: Any) -> Any:
        is_labelled = str(arguments[0]).endswith("classifier")
        return evaluate(*arguments, **{**keywords, **({} if is_labelled else {"n": 2})})

    monkeypatch.setattr(concept_eraser, "erase", short_erase)
    monkeypatch.setattr(concept_eraser, "evaluate", short_evaluate)
    monkeypatch.setattr(
        concept_eraser, "attack", lambda *names, **keywords: attack(*names, **{**keywords, "n": 2})
    )


# --- pages ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all stand-ins."""
    folder = tmp_path_factory.mktemp("stand_ins")
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_ins.make_all(folder, monkeypatch)
    return folder


@pytest.fixture(scope="module")
def dry_runs() -> dict[str, str]:
    """The outputs of dry runs. They write nothing, so that two pages share one."""
    return {}


@pytest.fixture
def upload(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """A function that runs `push` in this process, with a local server in place of the hub."""

    def run(words: list[str]) -> str:
        from huggingface_hub import constants

        from concept_eraser.cli.main import app

        with monkeypatch.context() as patch:
            hub = Hub()
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            patch.setattr(constants, "ENDPOINT", hub.url)
            patch.setenv("HF_TOKEN", TOKEN)
            result = CliRunner().invoke(app, words)
            hub.server.shutdown()
        assert result.exit_code == 0, (words, result.output, result.exception)
        assert "README.md" in hub.files
        return result.output

    return run


def run_command(page: Page, words: list[str], dry_runs: dict[str, str]) -> None:
    """Run a command, or do what its exemption says."""
    line = " ".join(words)
    exemption = exemption_of(words)
    words = without_variables(words)
    instead = exemption.instead if exemption else ""
    if instead == "nothing":
        return
    if instead == "run without the launcher":
        words = without_launcher(words)
        exemption = exemption_of(words)
    verb, values = parse_command(words)
    if instead == "parse":
        return
    error = exemption.instead if exemption and exemption.is_error else ""
    words = [REPLACEMENTS.get(word, word) for word in words[1:]]
    if verb == "push" and not values["dry_run"]:
        page.outputs[line] = page.hub(words)
        return
    if values.get("suite") in resources.names("eval"):
        words = [
            small_suite(page.folder, word) if word == values["suite"] else word for word in words
        ]
    is_dry_run = values.get("dry_run", False)
    if is_dry_run and line in dry_runs:
        page.outputs[line] = dry_runs[line]
        return
    result = page.cli(*words, *few_words(verb, values), cwd=page.folder)
    assert result.returncode == (2 if error else 0), (line, result.stderr)
    assert error in " ".join(result.stderr.split()), (line, result.stderr)
    page.outputs[line] = result.stdout
    if is_dry_run:
        dry_runs[line] = result.stdout


def small_suite(folder: Path, suite: str) -> str:
    """A copy of a suite with two images in each group, and two steps for each image."""
    content = suites.load(suite).model_dump(mode="json", exclude_none=True)
    for group in content["groups"].values():
        group["n"] = 2
    content["sampling"]["steps"] = 2
    (folder / f"{suite}.yaml").write_text(yaml.safe_dump(content))
    return f"{suite}.yaml"


def output_of(page: Page, beginning: str) -> str:
    """The output of the only command that begins so."""
    (output,) = [text for line, text in page.outputs.items() if line.startswith(beginning)]
    return output


def check_readme(page: Page) -> None:
    """The LoRA of the section on one's own checkpoint loads in plain diffusers."""
    from diffusers import StableDiffusionPipeline

    run = page.folder / "runs" / "van_gogh"
    assert (run / "exports" / "van_gogh-single-file.safetensors").is_file()
    assert (run / "exports" / "van_gogh-kohya.safetensors").is_file()
    pipeline = StableDiffusionPipeline.from_pretrained(page.folder / "sd15")
    pipeline.load_lora_weights(run / "lora")
    assert pipeline.get_active_adapters()


def check_own_checkpoint(page: Page) -> None:
    erase = "concept-eraser erase Van Gogh --kind style --model ./sd15 --memory"
    assert "would write runs/van_gogh" in output_of(page, f"{erase} 8gb --dry-run")
    output = output_of(page, f"{erase} 8gb --output")
    assert "concept:  Van Gogh (style); anchor concept: an unknown painter" in output
    # as the section says of single files, the base needs no weights
    bare = page.folder / "bare"
    shutil.copytree(page.folder / "sd15", bare)
    for weights in bare.rglob("*.safetensors"):
        weights.unlink()
    words = ["export", "model.safetensors", "--before", "bare", "--to", "diffusers"]
    result = page.cli(*words, "--output", "whole", cwd=page.folder)
    assert result.returncode == 0, result.stderr


def check_evaluate_a_checkpoint(page: Page) -> None:
    evaluation = page.values["measure"](lambda images: [0.9] * len(images))
    assert evaluation.find("concept_rate", "direct").after.value == 1


CHECKS: dict[str, Callable[[Page], None]] = {
    "README": check_readme,
    "how_to/own_checkpoint": check_own_checkpoint,
    "how_to/evaluate_a_checkpoint": check_evaluate_a_checkpoint,
}
# Files that the commands of a page must have written
PRODUCTS = {
    "README": ["runs/fish/suite.yaml", "runs/fish/attacks"],
    "index": ["runs/star/recipe.yaml", "runs/van_gogh/lora/pytorch_lora_weights.safetensors"],
    "how_to/own_checkpoint": [
        "runs/mine/lora",
        "runs/mine_in_python/lora",
        "after/00001.png",
        "model/model_index.json",
    ],
    "how_to/lora": [
        "half/model_index.json",
        "mine_folder/model_index.json",
        "no_star.safetensors",
        "runs/lora/exports/lora-kohya.safetensors",
        "runs/mine/exports/mine-single-file.safetensors",
        "runs/both/model_index.json",
        "erase.safetensors",
        "no_out.safetensors",
        "star_words.safetensors",
    ],
    "how_to/leco": ["leco.safetensors", "runs/from_python/lora"],
    "how_to/publish": ["README.md"],
    "how_to/several_concepts": ["runs/two/suites/church.yaml", "star.html"],
    "how_to/evaluate_a_checkpoint": ["both.html", "check_mine/evaluation.json"],
    "explanation/guidance": ["without_guidance/00000.png", "with_guidance/00000.png"],
}


@pytest.mark.parametrize("path", WALKED, ids=name_of)
def test_a_page_runs_in_its_order(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Any,
    sources: Path,
    upload: Callable[[list[str]], str],
    dry_runs: dict[str, str],
    few_calls: None,
) -> None:
    name = name_of(path)
    page = Page(path, tmp_path, cli, upload)
    blocks = [
        (kind, block)
        for kind, block in BLOCKS.findall(path.read_text(encoding="utf-8"))
        if kind in ("sh", "text", "python")
    ]
    texts = [block.replace("\\\n", " ") for _, block in blocks]
    without = ["runs/van_gogh"] if name == "README" else []
    stand_ins.supply(tmp_path, sources, texts, without=without)
    for file, text in files_on(path).items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    for kind, block in blocks:
        if kind == "python" and name not in ELSEWHERE:
            run_block(block, page.values)
        for words in commands_in(kind, block):
            run_command(page, words, dry_runs)
    for product in PRODUCTS.get(name, []):
        assert (tmp_path / product).exists(), product
    if name in CHECKS:
        CHECKS[name](page)


def files_on(path: Path) -> dict[str, str]:
    """Files that a page shows in full."""
    shown = {"measuring": "mine.yaml"}
    if name_of(path) not in shown:
        return {}
    (block,) = [b for kind, b in BLOCKS.findall(path.read_text(encoding="utf-8")) if kind == "yaml"]
    return {shown[name_of(path)]: block}


def test_every_page_with_code_is_executed() -> None:
    """Here, or in the file that ELSEWHERE names; and no exemption is left over."""
    lines: list[str] = []
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        if "generated" in path.parts or "_build" in path.parts:
            continue
        if path in WALKED:
            lines += [" ".join(without_launcher(words)) for words in commands_of(path)]
            lines += [" ".join(without_variables(words)) for words in commands_of(path)]
        kinds = {kind for kind, _ in BLOCKS.findall(path.read_text(encoding="utf-8"))}
        name = name_of(path)
        if "sh" in kinds:
            assert path in WALKED or ELSEWHERE[name] == "test_tutorials.py", name
        if "python" in kinds:
            assert path in WALKED or name in ELSEWHERE, name
    for start in EXEMPTIONS:
        assert any(line.startswith(start) for line in lines), start
    for name, file in ELSEWHERE.items():
        text = (ROOT / "tests" / "docs" / file).read_text()
        assert f"{name.rpartition('/')[2]}" in text, name


# --- examples of docstrings ----------------------------------------------------------------------

PACKAGE = ROOT / "concept_eraser"


def documented_objects() -> Iterator[tuple[str, str, str]]:
    """Module, name and docstring of every class and function with an example."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ">>>" not in text:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                documentation = ast.get_docstring(node) or ""
                if ">>>" in documentation:
                    yield module, node.name, documentation


EXAMPLES = {name: (module, text) for module, name, text in documented_objects()}


# What the example of a name ends with on a stand-in
EXAMPLE_ERRORS = dict.fromkeys(("attack", "Campaign", "CascadeCampaign"), NOTHING_TO_ATTACK.instead)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_runs(
    name: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_calls: None
) -> None:
    """With the results that it shows, where it shows some."""
    module, documentation = EXAMPLES[name]
    without = ["runs/star"] if name in ("Run", "Interrupted") else []
    stand_ins.supply(tmp_path, sources, [documentation], without=without)
    monkeypatch.chdir(tmp_path)
    if name in ("plug", "LabelledEvaluation"):
        make_labelled_run(name)
    for run in ("tiny_star_munba", "star_munba", "star_esd") if name == "report" else ():
        concept_eraser.evaluate(f"runs/{run}", "tiny_star", output=f"runs/{run}")
    if name in EXAMPLE_ERRORS:
        with pytest.raises(concept_eraser.UserError, match=EXAMPLE_ERRORS[name]):
            run_example(module, name, documentation)
        return
    output = run_example(module, name, documentation)
    assert name != "UserError" or "tiny-sd" in output, "the error names what is allowed"


def run_example(module: str, name: str, documentation: str) -> str:
    """Run an example in the names of its module, and return what it prints."""
    outputs = []
    values = dict(vars(importlib.import_module(module)))
    for example in doctest.DocTestParser().get_examples(documentation):
        output = StringIO()
        with redirect_stdout(output):
            mode = "single" if example.want else "exec"
            exec(compile(example.source, name, mode, dont_inherit=True), values)
        assert example.want in ("", output.getvalue())
        outputs.append(output.getvalue())
    return "".join(outputs)


def make_labelled_run(name: str) -> None:
    """Train what `plug` and the evaluation on labelled data read: runs/clip, runs/classifier."""
    if name == "plug":
        concept_eraser.erase(
            model="tiny-sd",
            target="clip",
            templates=["a picture of a {}"],
            forget={
                "data": "painted",
                "options": {"n": 40},
                "classes": ["star"],
                "loss": "relabel",
            },
            retain="rest",
            training={"steps": 1},
            output="runs/clip",
        )
        return
    from concept_eraser.models.module import build

    build("mlp", "classifier", inputs=64, hidden=16).save(Path("digits"))
    concept_eraser.erase(
        model="./digits",
        target="classifier",
        forget={"data": "digits", "classes": [3], "loss": "relabel"},
        retain="rest",
        training={"steps": 2},
        output="runs/classifier",
    )


def test_every_public_name_has_an_example() -> None:
    assert set(concept_eraser.__all__) <= EXAMPLES.keys()
