"""The comparison of caches on texts: every chosen task with every chosen cache, one table and a report."""
