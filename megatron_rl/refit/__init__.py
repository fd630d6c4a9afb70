"""Refit (weight sync): sends the trainer's weights to the engines over a transport, as one transaction."""
