"""Reading: what is asked for matched with what is stored, and read to where it belongs, once for each host."""
