"""`python app.py` opens the page, as `concept-eraser demo` does; it takes the same options."""

import sys

from concept_eraser.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["demo"]
    main()
