"""What a run tells of its steps: on the terminal, in logs, to trackers, in traces."""
