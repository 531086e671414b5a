"""What communicates, shown: traces, plans, policies, pictures, ranks that part ways."""
