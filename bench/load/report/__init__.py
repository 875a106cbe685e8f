"""What a reader sees: progress, table, JSON and HTML, and the comparison of reports."""
