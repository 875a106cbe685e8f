"""What a reader sees: progress, table, and the comparison of reports."""
