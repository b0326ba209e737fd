"""Open the demo page: `python app.py`. The options are those of `concept-eraser demo`."""

import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["demo"]
    try:
        from concept_eraser.cli.main import main

        main()
    except KeyboardInterrupt:
        print("stopped before the page was open; nothing was changed", file=sys.stderr)
        sys.exit(130)
