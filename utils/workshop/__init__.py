"""What stands behind `make`: set-up, JupyterLab, running and storing notebooks, generating labs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
