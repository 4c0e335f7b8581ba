"""Stage 5: drafter folders as engines read them, how they are served, and the validator of any folder."""
