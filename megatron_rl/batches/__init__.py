"""Batches: how rollouts are split over replicas, sent to the ranks, and packed into the batch that a loss reads."""
