"""What each lab gives: its checks and its helpers. Both copies of a notebook import them."""
