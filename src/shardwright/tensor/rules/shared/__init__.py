"""Tools shared by rules of several kinds; tools for one kind are in its own folder."""
