"""Plans: which parameters of a model are sharded, and how."""
