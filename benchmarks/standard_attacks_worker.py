"""Run attacks with the `concept_eraser` that Python finds, and print their CPU seconds.

    python benchmarks/standard_attacks_worker.py '{"protocol": …, "attacks": [["soft_prompt", …]]}'

`benchmarks.standard_attacks` starts it in the checkout that it measures. It imports nothing of this
folder and uses the public interface, so that it also runs with an older version. Each attack is a
list of the victim, the attack's name and its options.
"""

from __future__ import annotations

import json
import sys
import time

from concept_eraser import api


def main() -> None:
    work = json.loads(sys.argv[1])
    seconds = []
    for victim, name, options in work["attacks"]:
        # without an attack: its images are read from the cache from then on
        api.attack(victim, "seed_search", **work["protocol"], options={"tries": 1})
        began = time.process_time()
        api.attack(victim, name, **work["protocol"], options=options)
        seconds.append(time.process_time() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
