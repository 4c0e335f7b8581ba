"""The wiring of a drafter that others trained, inferred."""
