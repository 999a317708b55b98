"""What a run leaves behind for people: metrics, a live view, the report page and the summary."""
