"""`python -m concept_eraser` is `concept-eraser`: what `accelerate launch -m concept_eraser ...`
runs.
"""

from concept_eraser.cli.main import main

if __name__ == "__main__":
    main()
