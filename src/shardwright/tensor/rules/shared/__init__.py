"""Tools that rules of several kinds share; a rule of one kind keeps its tools beside it."""
