"""The algorithm. Knows torch only: no files, no command line, no data sets."""
