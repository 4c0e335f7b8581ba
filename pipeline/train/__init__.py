"""Stage 4: the drafter, training-time test, and the trainer."""
