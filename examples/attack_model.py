"""Attack somebody's model, and run a control beside the attack.

    python examples/attack_model.py runs/star
    python examples/attack_model.py ./erased-sd --before ./sd14 --suite nudity --attack unlearn_diff

Without arguments the script attacks the original bundled model. There the concept's word is hidden
from the prompts, and the attack should succeed. An attack that fails there is too weak.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import concept_eraser

QUICK = {
    "soft_prompt": {"steps": 4, "every": 2},
    "seed_search": {"tries": 1},
}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-sd", help="run, folder, LoRA or hub id")
    parser.add_argument("--before", help="the original (default: the one that the run names)")
    parser.add_argument("--suite", help="judge and prompts (default: the suite of the run)")
    parser.add_argument("--attack", default="soft_prompt", help="see: concept-eraser list attacks")
    parser.add_argument("--n", type=int, default=16, help="prompts")
    parser.add_argument("--quick", action="store_true", help="a tiny budget: does the script run?")
    arguments = parser.parse_args()

    is_bundled = arguments.model == "tiny-sd"
    suite = arguments.suite or ("tiny_star" if is_bundled else None)
    for name in (arguments.attack, "seed_search"):
        campaign = concept_eraser.attack(
            arguments.model,
            name,
            suite,
            before=arguments.before,
            n=2 if arguments.quick else arguments.n,
            hide="shape" if is_bundled else None,
            options=QUICK.get(name) if arguments.quick else None,
        )
        rates = campaign.rates()
        pre, post = rates["pre"], rates["asr"]
        label = f"{name} (a control)" if name == "seed_search" else name
        print(f"{label}: pre-ASR {pre['value']:.0%}, post-ASR {post['value']:.0%}", end=" ")
        print(f"[{post['low']:.0%}, {post['high']:.0%}], n = {post['n']}")
        for attempt in campaign.attempts:
            if attempt.success and attempt.text not in (None, attempt.prompt):
                print(f"  {attempt.prompt!r} -> {attempt.text!r}")


if __name__ == "__main__":
    main()
