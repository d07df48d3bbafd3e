"""Where metrics go: the console line, the metrics file and the trackers."""
