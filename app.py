"""`python app.py` opens the page, as `concept-eraser demo` does; it takes the same options."""

import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["demo"]
    try:
        from concept_eraser.cli.main import main

        main()
    except KeyboardInterrupt:
        print("stopped before the page was open; nothing was changed", file=sys.stderr)
        sys.exit(130)
