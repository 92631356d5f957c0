"""`python -m utils.prompt_tuning`: the program that tunes a prompt (utils/prompts/command.py)."""

import sys

from utils.imports import collector_at_rest

if __name__ == "__main__":
    with collector_at_rest():
        from utils.prompts.command import main
    sys.exit(main())
