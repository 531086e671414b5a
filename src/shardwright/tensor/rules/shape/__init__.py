"""Elements rearranged, none of them looked at: views, joins, splits, turns."""
