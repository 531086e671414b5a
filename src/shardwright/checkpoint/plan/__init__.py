"""Who writes what, and who reads what from where: pure functions of values."""
