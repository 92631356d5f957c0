"""What stands behind `make`: set-up, JupyterLab, running and storing notebooks, generating labs."""
