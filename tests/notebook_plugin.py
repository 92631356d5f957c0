"""Makes nbval strict safe for this workshop (see pyproject.toml, which loads it)."""
