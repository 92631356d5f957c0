"""`python -m utils.prompt_tuning`: tune a prompt, as a program (utils/prompts/command.py)."""

import sys

from utils.prompts.command import main

if __name__ == "__main__":
    sys.exit(main())
