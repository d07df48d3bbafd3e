"""What a rank does: actor, critic, rollout, and the weights between them."""
