"""Indexing: reads and writes by index, by mask, by slice."""
