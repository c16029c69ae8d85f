"""The folder of a run: complete checkpoints, resuming, what a run refuses or deletes, and upload to the Hub."""
