"""Elements read and written by number, by mask, by slice."""
