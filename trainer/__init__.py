"""The learner's side: batches, advantages, losses, backends, checkpoints, publishing."""
