"""docs/licences.md: the licences of every dependency and of every data file of this repository.

    python -m tools.licences
    python -m tools.licences --check

The first command writes the page from the installed packages. The second exits with 1 where the
default install has a copyleft licence besides nudenet's.

A licence is what a package's metadata declares, as an SPDX name. The licence files inside the
package are also searched for whole texts of the GPL, the AGPL and the LGPL. A person has reviewed
each text that the metadata does not declare, and `REVIEWED` holds the result.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "licences.md"
# the only copyleft package of the default install; the project needs it
NEEDED_COPYLEFT = frozenset({"nudenet"})
NOT_INSTALLED = {"bitsandbytes": "MIT"}  # no test environment has this extra; by its own page

# What the licence files of a package say beyond its metadata, with the version that a person
# reviewed.
REVIEWED = {
    "nudenet": (
        "AGPL-3.0",
        (
            "3.4.2: the metadata says MIT, LICENSE and LICENSE.md in the wheel are the "
            "AGPL-3.0, and the model 320n.onnx names AGPL-3.0 (Ultralytics) as its licence. "
            "The strictest is taken"
        ),
    ),
    "clean-fid": ("MIT", "0.1.35: the classifier says BSD, LICENSE is the MIT licence"),
    "numpy": (
        "",
        (
            "2.4.6: the wheel holds libgfortran (GPL-3.0 with the GCC runtime library "
            "exception, which frees programs that use it) and libquadmath (LGPL-2.1)"
        ),
    ),
    "scipy": ("", "1.17.1: as numpy"),
    "opencv-python-headless": (
        "",
        (
            "5.0.0.93: the wheel holds FFmpeg (LGPL-2.1) and others as libraries of their "
            "own, loaded at run time; comes with nudenet"
        ),
    ),
    "setuptools": (
        "",
        (
            "84.2.1: holds a copy of autocommand (LGPL-3.0), used by its own command line; "
            "torch asks for it"
        ),
    ),
    "docutils": (
        "BSD-2-Clause",
        (
            "0.22.4: most files are in the public domain, some under the BSD-2-Clause; the "
            "GPL-3.0 is of an editor mode (rst.el) that is not in the wheel"
        ),
    ),
    "torch": (
        "",
        (
            "2.13.0: names the licence (GPL-3.0) of test files of a library below it (cpr); "
            "they are not in the wheel"
        ),
    ),
}

_SPDX = [  # declared text or classifier, lower case -> SPDX; the first that fits
    (r"affero|agpl", "AGPL-3.0"),
    (r"lesser general public|lgpl", "LGPL-3.0"),
    (r"gplv3|gpl-3|general public license v3", "GPL-3.0"),
    (r"gpl", "GPL-2.0-or-later"),
    (r"mpl-2.0 and mit", "MPL-2.0 AND MIT"),
    (r"mozilla|\bmpl\b|\bmpl-2", "MPL-2.0"),
    (r"apache", "Apache-2.0"),
    (r"^mit\b|mit license", "MIT"),
    (r"python software|\bpsf\b|matplotlib versions", "PSF-2.0"),
    (r"\bisc\b", "ISC"),
    (r"3-clause|bsd-3|modified bsd|new bsd", "BSD-3-Clause"),
    (r"2-clause|bsd-2", "BSD-2-Clause"),
    (r"bsd", "BSD"),
    (r"redistribution and use in source", "BSD"),
    (r"\bhpnd\b|historical permission", "HPND"),
]
_TEXTS = re.compile(r"^\s*GNU (AFFERO |LESSER |LIBRARY )?GENERAL PUBLIC LICENSE\s*$", re.MULTILINE)
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Package:
    """An installed package: its name, version, SPDX licence, and what was reviewed in its files."""

    name: str
    version: str
    licence: str
    texts: frozenset[str]  # names of copyleft texts in its licence files
    note: str = ""

    @property
    def copyleft(self) -> str:
        """ "strong" (GPL, AGPL), "library" (LGPL), "file" (MPL), or "" if it is permissive."""
        if re.search(r"(?<!L)GPL", self.licence):
            return "strong"
        return "library" if "LGPL" in self.licence else "file" if "MPL" in self.licence else ""

    @property
    def unreviewed(self) -> bool:
        """Whether its files hold a copyleft text that no person has reviewed."""
        return (
            bool(self.texts)
            and self.copyleft not in ("strong", "library")
            and self.name not in REVIEWED
        )


def plain(name: str) -> str:
    """Return a package's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def groups() -> dict[str, list[str]]:
    """Return the requirements of pyproject.toml: "default", then each extra, as written.

    `all` only joins other extras.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: rows for name, rows in project["optional-dependencies"].items() if name != "all"
    }
    return {"default": project["dependencies"], **extras}


def names(requirements: Iterable[str]) -> list[str]:
    """Return the packages that some requirements name, sorted."""
    matches = (_REQUIREMENT.match(one) for one in requirements)
    return sorted({plain(match[0]) for match in matches if match})


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the packages that some requirements bring: their own and what these need.

    Packages that are not installed are included.
    """
    from packaging.requirements import Requirement

    packages: set[tuple[str, str]] = set()
    todo = [Requirement(one) for one in requirements]
    while todo:
        one = todo.pop()
        name = plain(one.name)
        for extra in ("", *one.extras):
            if (name, extra) in packages:
                continue
            packages.add((name, extra))
            try:
                dependencies = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            inner = (Requirement(text) for text in dependencies)
            todo += [r for r in inner if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in packages}


def package(name: str) -> Package:
    """Return the facts about one package.

    Raises KeyError if it is neither installed nor in NOT_INSTALLED.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return Package(name, "not installed here", NOT_INSTALLED[name], frozenset())
    reviewed, note = REVIEWED.get(name, ("", ""))
    texts = list(_licence_texts(distribution))
    gnu = {
        re.sub(r"\s+", " ", match[0].strip().upper())
        for text in texts
        for match in _TEXTS.finditer(text)
    }
    return Package(
        name,
        distribution.version.partition("+")[0],
        reviewed or _declared_licence(distribution, texts),
        frozenset(gnu),
        note,
    )


def _licence_texts(distribution: metadata.Distribution) -> Iterator[str]:
    for file in distribution.files or []:
        if re.search(
            r"licen[cs]e|copying|notice", file.name, re.IGNORECASE
        ) and file.suffix not in (".py", ".pyc"):
            path = Path(str(distribution.locate_file(file)))
            if path.is_file() and path.stat().st_size < 2**22:
                yield path.read_text(encoding="utf-8", errors="replace")


def _declared_licence(distribution: metadata.Distribution, texts: list[str]) -> str:
    """Return the SPDX name of the declared licence: an expression, a classifier or a text.

    The kind of BSD follows from its text.
    """
    expression = distribution.metadata.get("License-Expression")
    if expression:
        return expression.strip()
    classifiers = [
        c for c in distribution.metadata.get_all("Classifier") or [] if c.startswith("License ::")
    ]
    license_text = (distribution.metadata.get("License") or "").strip()
    kinds = [spdx for one in (license_text, *classifiers) for spdx in [_spdx(one)] if spdx]
    kind = next((one for one in kinds if one != "BSD"), kinds[0] if kinds else "")
    if not kind:
        kind = next((spdx for text in texts for spdx in [_spdx(text)] if spdx), "unknown")
    if kind == "BSD":
        kind = (
            "BSD-3-Clause"
            if any("Neither the name" in text for text in [license_text, *texts])
            else "BSD-2-Clause"
        )
    return kind


def _spdx(text: str) -> str:
    beginning = text.strip()[:400].lower()  # the name of a licence; its text names others
    return next((spdx for pattern, spdx in _SPDX if re.search(pattern, beginning)), "")


def problems() -> list[str]:
    """List what the default install must not have.

    That is GPL, AGPL or LGPL except nudenet's, unknown licences, and texts without a review.
    """
    packages = [package(name) for name in sorted(closure(groups()["default"]))]
    bad = [
        f"{p.name}: {p.licence}"
        for p in packages
        if p.copyleft in ("strong", "library") and p.name not in NEEDED_COPYLEFT
    ]
    bad += [
        f"{p.name}: {', '.join(sorted(p.texts))} in its files; review it and add it to REVIEWED"
        for p in packages
        if p.unreviewed
    ]
    return bad + [f"{p.name}: no licence found" for p in packages if p.licence == "unknown"]


# Data files of this repository: (pattern, what it is, where it is from, licence). The first
# matching pattern counts.
MADE = "made by this project"
DATA = [
    (
        "concept_eraser/tiny/weights/tiny-sd/tokenizer/*",
        "the vocabulary and merges of the bundled tokenizer",
        "CLIP's byte-pair encoding (OpenAI), read from the copy that open_clip installs",
        "MIT",
    ),
    (
        "concept_eraser/tiny/weights/*",
        "the bundled pipeline, two CLIPs and two judges",
        (
            "trained from scratch on images that concept_eraser/tiny/painter.py paints; no "
            "outside data"
        ),
        "Apache-2.0",
    ),
    ("concept_eraser/*.css", "styles of the pages", MADE, "Apache-2.0"),
    ("concept_eraser/*.html", "templates of the reports", MADE, "Apache-2.0"),
    ("concept_eraser/*.md", "template of the model card", MADE, "Apache-2.0"),
    (
        "concept_eraser/concepts/*.yaml",
        "kinds of concepts with their templates, known concepts",
        "written for concept_eraser",
        "Apache-2.0",
    ),
    ("concept_eraser/py.typed", "an empty mark for type checkers", MADE, "Apache-2.0"),
    (
        "prompts/i2p_*.yaml",
        (
            "a reference to rows of I2P (Schramowski et al., arXiv 2211.05105); no prompt of "
            "it is copied"
        ),
        "read from the hub or its cache when it is used",
        "the file: Apache-2.0; I2P states none",
    ),
    (
        "prompts/unlearn_diff_*.yaml",
        "a reference to the prompts of UnlearnDiffAtk (arXiv 2310.11868); none is copied",
        "a table that the user gets from its authors; not copied here",
        "none stated",
    ),
    (
        "prompts/coco_*.yaml",
        "a reference to captions of COCO (Lin et al. 2014); none is copied",
        "a table that the user gets from its authors; not copied here",
        "CC-BY-4.0",
    ),
    ("tests/plugin_package/*", "a sample package of plug-ins", MADE, "Apache-2.0"),
    ("prompts/*.yaml", "prompt sets", "written for concept_eraser", "Apache-2.0"),
    ("pipelines/*.yaml", "recipes", MADE, "Apache-2.0"),
    (
        "tests/campaigns/results/*",
        "counts of the campaigns: damaged inputs, faults, mutants",
        "measured by tests/campaigns",
        "Apache-2.0",
    ),
    (
        "eval/results/*",
        "results of the studies: tables, numbers, plots, images",
        (
            "measured on the bundled model; its images, or images of the papers' problems "
            "drawn by this project"
        ),
        "Apache-2.0",
    ),
    ("eval/*.yaml", "suites", MADE, "Apache-2.0"),
    (
        "studies/published/*",
        "rows of published leaderboards and tables, each with its source",
        "read from the named pages; numbers only, no text is copied",
        "the files: Apache-2.0; the pages: as each file states",
    ),
    ("studies/configs/*", "configurations and notes of the studies", MADE, "Apache-2.0"),
    ("docs/*.png", "images of the bundled model, screenshots of the demo", MADE, "Apache-2.0"),
    ("docs/*.md", "documents", MADE, "Apache-2.0"),
    ("docs/*.svg", "figures of measured numbers", MADE, "Apache-2.0"),
    ("examples/*.ipynb", "notebooks", MADE, "Apache-2.0"),
    ("examples/*.md", "documents", MADE, "Apache-2.0"),
    ("docs/_static/*.css", "style of the documentation site", MADE, "Apache-2.0"),
    ("benchmarks/*", "measured times and memory", MADE, "Apache-2.0"),
]
_FOLDERS = (
    "concept_eraser",
    "prompts",
    "pipelines",
    "eval",
    "docs",
    "benchmarks",
    "tests",
    "examples",
    "studies",
)
_BUILT = ("_build", "generated")  # folders of docs/ that `make docs` writes and git ignores
# read while a command or a test runs, and not part of this repository: (what, by what, from where,
# licence)
USED = [
    (
        "320n.onnx, NudeNet's model",
        "the judge and metric `nudenet`, `detect`, the demo",
        "the wheel of nudenet",
        "AGPL-3.0",
    ),
    (
        "DejaVu fonts",
        "plots of the reports, the data set `fonts`",
        "the wheel of matplotlib",
        "Bitstream Vera licence, public domain changes",
    ),
    (
        "system fonts",
        "the demo and the reports, named in CSS",
        "the reader's own system",
        "not distributed",
    ),
    (
        "BPE vocabulary of CLIP",
        "`concept_eraser.tiny.build`",
        "the wheel of open-clip-torch",
        "MIT",
    ),
    (
        "astronaut, a photograph of E. Collins (NASA)",
        "tests/evaluation/test_nudity.py",
        "the wheel of scikit-image",
        "public domain",
    ),
    (
        "handwritten digits (UCI)",
        "the data set `digits`, tests",
        "the wheel of scikit-learn",
        "CC-BY-4.0",
    ),
    (
        "MNIST",
        "the data set `mnist`",
        "a folder that the user has",
        "CC-BY-SA-3.0 by Keras, MIT by a card of the hub; its own page was not read here",
    ),
    (
        "CelebA",
        "the data set `celeba`",
        "a folder that the user has",
        "non-commercial research, by its page",
    ),
    ("CIFAR-10", "the data set `cifar10`", "a folder that the user has", "none stated"),
    (
        "SVHN",
        "the data set `svhn`",
        "a folder that the user has",
        "non-commercial use, by its page",
    ),
    (
        "Oxford-IIIT Pets",
        "the data set `oxford_pets`",
        "a folder that the user has",
        "CC-BY-SA-4.0",
    ),
    ("Imagenette", "the data set `imagenette`", "a folder that the user has", "ImageNet's terms"),
    (
        "CelebA-HQ",
        "the data set `celeba_hq`",
        "a folder that the user has",
        "non-commercial research, by its page",
    ),
    (
        "ImageNet weights of torchvision's ResNets",
        "the judge `imagenet`, suites `imagenette_*`",
        "a file that the user has",
        "BSD-3-Clause; ImageNet's terms for its images",
    ),
    (
        "a classifier of transformers, e.g. UnlearnDiffAtk's artists",
        "the judge `image_classifier`, suite `vangogh`",
        "a folder that the user has",
        "its authors'; UnlearnDiffAtk states none",
    ),
    (
        "a face embedding with references",
        "the judge `face`, suite `celebrity`",
        "a folder that the user has",
        "its authors'; the network is the user's choice, so none was read here",
    ),
    (
        "Q16's prompt vectors (arXiv 2202.06675)",
        "the judge `q16`, suite `violence`",
        "a file that the user has",
        "MIT by the badge of its README; a licence file was not read here",
    ),
    (
        "UnlearnDiffAtk's 142 prompts",
        "the suite `unlearn_diff_nudity`",
        "a file that the user has",
        "none stated",
    ),
    (
        "I2P, COCO captions",
        "prompt sets that name them",
        "the hub, or a file that the user has",
        "none stated; CC-BY-4.0",
    ),
]


def data_files() -> list[str]:
    """List the data files of this repository, relative to its root: all files except Python."""
    paths = (path for folder in _FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    relative_paths = (
        path.relative_to(ROOT) for path in paths if path.suffix not in (".py", ".pyc")
    )
    return sorted(
        path.as_posix()
        for path in relative_paths
        if not any(part.startswith(".") or part in _BUILT for part in path.parts)
    )


def line_of(file: str) -> tuple[str, str, str, str] | None:
    """Return the line of DATA that covers a data file, or None."""
    return next((line for line in DATA if fnmatch(file, line[0])), None)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def direct_rows(group: str) -> list[list[str]]:
    """Return name and licence of each direct dependency of a group.

    The rows do not depend on versions.
    """
    return [[f"`{name}`", package(name).licence] for name in names(groups()[group])]


def _closure_rows(packages: Iterable[str]) -> list[list[str]]:
    rows = [package(name) for name in sorted(packages)]
    return [
        [f"`{p.name}`", p.version, p.licence, p.note] for p in rows if p.name != "concept-eraser"
    ]


def _installed_packages(packages: Iterable[str]) -> list[str]:
    def there(name: str) -> bool:
        try:
            return name in NOT_INSTALLED or bool(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            return False

    return [name for name in packages if there(name)]


def render() -> str:
    """Render the page."""
    every = groups()
    default = closure(every["default"])
    weak = [
        p.name for p in map(package, _installed_packages(sorted(default))) if p.copyleft == "file"
    ]
    parts = [
        _INTRODUCTION.format(
            weak=", ".join(f"`{name}`" for name in weak),
            agpl="\n".join(f"| {who} | {what} |" for who, what in _AGPL),
        )
    ]
    parts += [
        "## Direct dependencies\n",
        "What `pip install concept-eraser` asks for by name.\n",
        _table(["package", "licence"], direct_rows("default")),
    ]
    for extra, why in _EXTRAS.items():
        parts += [f"### {extra}\n", why + "\n", _table(["package", "licence"], direct_rows(extra))]
    parts += [
        "## Everything that is installed with them\n",
        (
            "As installed where this page was made; versions and, with them, packages differ "
            "elsewhere.\n"
        ),
        _table(
            ["package", "version", "licence", "what its files hold beside"],
            _closure_rows(_installed_packages(default)),
        ),
    ]
    for extra in _EXTRAS:
        extra_packages = closure(every[extra]) - default
        parts += [
            f"### More by {extra}\n",
            _table(
                ["package", "version", "licence", "what its files hold beside"],
                _closure_rows(_installed_packages(extra_packages)),
            ),
        ]
    parts += [
        "## Data files of this repository\n",
        _table(
            ["files", "what", "origin", "licence"], ([f"`{line[0]}`", *line[1:]] for line in DATA)
        ),
    ]
    parts += [
        "## Data that is read and not part of this repository\n",
        _table(["what", "by what", "from where", "licence"], USED),
    ]
    return "\n".join(parts)


_EXTRAS = {
    "curvature": "`pip install 'concept-eraser[curvature]'`: the solver kfac of natural_gradient.",
    "labelled": (
        "`pip install 'concept-eraser[labelled]'`: membership attacks, the data set `digits`."
    ),
    "memory": "`pip install 'concept-eraser[memory]'`: the optimizer adamw8bit.",
    "statistics": (
        "`pip install 'concept-eraser[statistics]'`: Holm's correction of tables of comparisons."
    ),
    "torchjd": (
        "`pip install 'concept-eraser[torchjd]'`: the method torchjd. Its solvers `quadprog` "
        "(GPL) and `qpsolvers` (LGPL) are copyleft."
    ),
    "trackers": "`pip install 'concept-eraser[trackers]'`: TensorBoard and W&B.",
    "docs": "`pip install 'concept-eraser[docs]'`: the documentation site (`make docs`).",
    "dev": (
        "`make test`, `make check`: tools of development, on no user's machine. `ecos`, "
        "which TorchJD's NashMTL needs, is under the GPL."
    ),
}
# who, and what the AGPL-3.0 asks of them
_AGPL = (
    (
        "runs it on their own machine",
        (
            "Nothing. Running a program needs no permission, and what stays with you need not be "
            "published. What nudenet says of an image is not covered."
        ),
    ),
    (
        "passes on an environment (a container, an image, a zip with packages)",
        (
            "You pass on nudenet. Pass on its licence and its source (the wheel is source; the "
            "model is part of it), and do not restrict it further. Whether an environment in "
            "which other code imports nudenet is one work with it is disputed; ask a lawyer. "
            "Without nudenet in it, the question does not arise."
        ),
    ),
    (
        "serves the demo on a network",
        (
            "Section 13 is for who runs a *changed* version for others over a network: these "
            "users must be offered its source. Unchanged, as pip installs it, it asks for no "
            "offer. Whether the demo around it counts as a changed version is disputed too; "
            "concept_eraser's own source is public under the Apache-2.0, and changes of yours to "
            "it may be asked for. Ultralytics, whose licence the model names, sells another "
            "licence and reads the AGPL widely."
        ),
    ),
)
_INTRODUCTION = """# Licences

*Written by `python -m tools.licences` (`make licences`) from the packages installed where it \
ran. A test renders the
direct dependencies again, and fails where the default install has a copyleft licence but \
nudenet's, or where a data file
has no line here. This page is no legal advice: ask a lawyer.*

concept_eraser is under the [Apache-2.0](../LICENSE). What `pip install concept-eraser` brings is \
under permissive licences,
with these exceptions:

* `nudenet` is under the AGPL-3.0; see below.
* {weak} are under the MPL-2.0, in whole or in part. It covers their own files: who changes these \
files and passes them on
  gives the changed files under the MPL too. Other code is not touched by it. They come with the \
clients of HTTP and of the
  hub and with Gradio, and cannot be left out.
* Wheels of `numpy`, `scipy` and `opencv-python-headless` hold compiled libraries of others, some \
under the LGPL or under
  the GPL with an exception for programs that use them; the table names them. Who passes such \
wheels on passes their
  licence files on.

## nudenet and the AGPL-3.0

The metadata of the nudenet wheel says MIT. The wheel itself holds the text of the AGPL-3.0 twice \
(LICENSE, LICENSE.md), and
its model `320n.onnx` names "AGPL-3.0 License (https://ultralytics.com/license)" in its own \
metadata. We take the stricter
of the two to hold for both.

concept_eraser holds no code and no weights of nudenet. pip fetches it from its own authors. It \
is imported when a detector
is first used, by: the judge and the metric `nudenet` (suites `nudity`, `i2p_nudity`, `i2p`, \
`unlearn_diff_nudity`,
`coco_30k`, or a suite of yours), the judge `face` (suite `celebrity`), the command `detect`, and \
the demo.

**Does the demo load it?** Not when it starts, and not for the images of the bundled model. It \
loads nudenet in its own
process in two places. In Compare: when "Captions by" is NudeNet, or is auto (the default) and \
the images are not 64 x 64.
In Attack: for the images of an attack that are not 64 x 64. Evaluations that the demo starts \
load it in a process of their own where the
suite asks for it. With "Captions by" set to none or to the bundled judge, Compare does not load \
it; Attack has no such
choice.

| who | what the AGPL-3.0 asks, as we read it |
|---|---|
{agpl}

Without nudenet (`pip uninstall nudenet`) everything works but the places named above, which then \
end with an error.
"""


def main(arguments: list[str]) -> int:
    """Write the page, or check. Returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail for mistakes")
    if parser.parse_args(arguments).check:
        mistakes = problems()
        print("\n".join(mistakes) or "no copyleft licence in the default install but nudenet's")
        return int(bool(mistakes))
    PAGE.write_text(render(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
