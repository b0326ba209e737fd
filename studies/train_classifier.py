"""Train a classifier of models/architectures/ on a data set of data/datasets/.

These are the original models of the recipes for CIFAR-10, SVHN and others.

    python -m studies.train_classifier cifar10 --architecture resnet18 --output runs/cifar10 --set
    root=data python -m studies.train_classifier digits --architecture mlp --options inputs=64
    --output runs/digits

SGD with momentum 0.9, weight decay 5e-4 and a learning rate that falls along a cosine (MUNBa,
section 4.2: 182 epochs at 0.1 for CIFAR-10), without augmentation. The command prints the accuracy
on the test split. A recipe takes the folder as `model`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from concept_eraser import registry
from concept_eraser.cli.progress_bars import bars
from concept_eraser.evaluation.labelled.classification import predict
from concept_eraser.models.module import build
from concept_eraser.training.fit import Plan, fit
from concept_eraser.utils.errors import UserError


def options(pairs: list[str]) -> dict[str, Any]:
    """Return key=value pairs as a dictionary. YAML reads the values."""
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"cannot read {pair!r}; write key=value")
        values[key] = yaml.safe_load(value)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=registry.names("dataset"))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="options of the data set"
    )
    parser.add_argument(
        "--architecture", choices=registry.names("architecture"), default="resnet18"
    )
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="key=value",
        help="options of the architecture; classes are the data's",
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder of the model")
    args = parser.parse_args()
    try:
        if args.output.exists() and any(args.output.iterdir()):
            raise UserError(f"{args.output} is not empty; give a new folder")
        train(args)
    except UserError as error:
        parser.error(str(error))


def train(args: argparse.Namespace) -> None:
    """Train the model and save it."""
    plugin = registry.build("dataset", args.data, options(args.set))
    data, test = plugin.load("train"), plugin.load("test")
    torch.manual_seed(args.seed)
    model = build(
        args.architecture, "classifier", **{"classes": len(data.names), **options(args.options)}
    )
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    device, net = model.device, model.module

    def loss(rows: Any) -> torch.Tensor:
        return F.cross_entropy(
            net(data.inputs(rows).to(device)), data.labels[list(rows)].to(device)
        )

    plan = Plan(args.epochs, args.batch_size, args.lr, weight_decay=5e-4, seed=args.seed)
    with bars() as progress:
        seconds = fit(net, loss, torch.arange(len(data)), plan, progress=progress)
    model.save(args.output)
    correct = predict(net, test, torch.arange(len(test))).correct
    print(
        f"{100 * correct.mean():.2f} % of {len(test)} test examples are right after "
        f"{seconds:.0f} s; saved in {args.output}"
    )


if __name__ == "__main__":
    main()
