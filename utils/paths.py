"""Where things lie in the repository. Every module that needs a folder of it asks here."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
