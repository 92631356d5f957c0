"""The look of all figures, and the drawings of each lesson."""
