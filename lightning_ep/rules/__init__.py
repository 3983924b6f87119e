"""The rows of the table in `constraints.py`, by the feature that they are about."""
