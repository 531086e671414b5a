"""A program while it is generated: its steps so far, its values and their names, and the comparison of results."""
