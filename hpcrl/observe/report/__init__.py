"""A report of runs as one HTML file that opens without a server."""
