"""A classifier of handwritten digits forgets one digit.

    python examples/unlearn_class.py --digit 3

The script trains a small torch network, erases the digit, and prints accuracies before and after.
It needs scikit-learn: pip install "concept-eraser[labelled]"
"""

import copy
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import concept_eraser


def train(inputs: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return net


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--digit", type=int, default=3, choices=range(10), help="what to forget")
    parser.add_argument("--steps", type=int, default=200, help="training steps of the erasure")
    parser.add_argument("--output", default="runs/unlearn_class", help="run folder")
    parser.add_argument("--quick", action="store_true", help="two steps: does the script run?")
    arguments = parser.parse_args()

    images, digits = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(images / 16).float(), torch.tensor(digits)
    train_inputs, test_inputs, train_labels, test_labels = train_test_split(
        inputs, labels, test_size=0.2, stratify=labels, random_state=0
    )
    original = train(train_inputs, train_labels)

    net = copy.deepcopy(original)  # erase changes a model in memory in place
    data = (train_inputs, train_labels)
    steps = 2 if arguments.quick else arguments.steps
    run = concept_eraser.erase(
        model=net,
        target="classifier",
        forget={"data": data, "classes": [arguments.digit], "loss": "relabel"},
        retain="rest",
        method="munba",
        training={"steps": steps, "batch_size": 64, "lr": 0.01, "optimizer": "sgd"},
        output=arguments.output,
    )

    sets = {"forget": data, "test": (test_inputs, test_labels)}
    evaluation = concept_eraser.evaluate(run.folder, before=original, after=net, data=sets)
    for result in evaluation.results:
        before, after = result.before.value, result.after.value
        print(f"{result.group:24} {before:6.1%} before, {after:6.1%} after, n = {result.after.n}")


if __name__ == "__main__":
    main()
