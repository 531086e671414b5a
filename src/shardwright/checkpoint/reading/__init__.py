"""Reading: match the target with what is stored, assign the reads, read into place, fill the state."""
