"""The folder of a run on the disk: whole checkpoints, resuming, what is refused and deleted, what goes to the Hub."""
