"""What communicates, shown: explanations of a call, pictures of a layout."""
