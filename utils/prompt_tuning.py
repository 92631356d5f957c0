"""`python -m utils.prompt_tuning`: tune a prompt, as a program (utils/prompts/command.py)."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # it takes a quarter of the time of these imports
    from utils.prompts.command import main

    gc.enable()
    gc.freeze()
    sys.exit(main())
